"""run_summary: from a folder made by hand and from a run."""

import json

import pytest
from conftest import TEXTS, make_lora, make_model, make_tokenizer

from rlhf_kit import PPOTrainer, run_summary
from rlhf_kit.callbacks import COMPLETIONS_FILE, LOG_FILE
from rlhf_kit.report import read_jsonl

LAST_CHANCE = "is it the output_dir of a run that has logged?"


def numbers(prefix="", **overrides):
    values = {"score": 1.0, "ref_kl": 0.0, "entropy": 3.0, "completion_length": 20.0, "eos_rate": 0.0, **overrides}
    return {prefix + name: value for name, value in values.items()}


def row(split, iteration, prompt, completion, score=1.0, ref_kl=0.0):
    return {
        "split": split, "iteration": iteration, "prompt": prompt, "completion": completion, "score": score,
        "ref_kl": ref_kl, "length": 3, "ended": True,
    }  # fmt: skip


def write(folder, log, completions=()):
    for name, rows in ((LOG_FILE, log), (COMPLETIONS_FILE, completions)):
        text = "".join(json.dumps(entry, ensure_ascii=False) + "\n" for entry in rows)
        (folder / name).write_text(text, encoding="utf-8")
    return folder


LOG = [
    {"iteration": 0, **numbers("eval_", score=0.5)},
    {"iteration": 1, **numbers(score=1.25)},
    {"iteration": 2, **numbers(score=2.0)},
    {"iteration": 3, **numbers(score=3.75, ref_kl=0.2345, entropy=1.5, completion_length=12.34, eos_rate=0.875)},
    {"iteration": 3, **numbers("eval_", score=2.5, ref_kl=0.1)},
]
ROWS = [
    row("eval", 0, "A dog", " barks", 1.0, 0.0),
    row("eval", 0, "A cat", " meows", 2.0, 0.0),
    row("train", 1, "A cow", " moos", 9.0, 0.9),
    row("train", 3, "A pig", " oinks", 9.0, 0.9),
    row("train", 3, "A cow", " chews", 9.0, 0.9),
    row("eval", 3, "A dog", " sings.", 3.0, 0.25),
    row("eval", 3, "A cat", " dances.", 4.0, 0.5),
]


def test_first_and_last_numbers_stand_side_by_side(tmp_path):
    # kills: the second line for the last, eval numbers among the training ones, columns swapped
    lines = run_summary(write(tmp_path, LOG, ROWS)).splitlines()
    training = lines.index(next(line for line in lines if line.startswith("Training prompts")))
    assert lines[training].split() == ["Training", "prompts", "iteration", "1", "iteration", "3"]
    table = [" ".join(line.split()) for line in lines[training + 1 : training + 6]]
    assert table == [
        "score 1.25 3.75",
        "reference KL, nats per token 0.000 0.234",
        "entropy, nats per token 3.00 1.50",
        "completion length, tokens 20.0 12.3",
        "ended by itself 0% 88%",
    ]
    held_out = lines.index(next(line for line in lines if line.startswith("Held-out prompts")))
    assert lines[held_out].split()[-4:] == ["iteration", "0", "iteration", "3"]
    assert lines[held_out + 1].split() == ["score", "0.50", "2.50"]
    assert len({len(line) for line in lines[held_out : held_out + 6]}) == 1  # columns line up


def test_completions_of_held_out_prompts_before_and_after(tmp_path):
    # kills: rows of training prompts shown, before and after of different prompts paired
    text = run_summary(write(tmp_path, LOG, ROWS))
    lines = [" ".join(line.split()) for line in text.splitlines()]
    start = lines.index("A dog")
    assert lines[start : start + 3] == ["A dog", "before 1.00 0.000 barks", "after 3.00 0.250 sings."]
    start = lines.index("A cat")
    assert lines[start : start + 3] == ["A cat", "before 2.00 0.000 meows", "after 4.00 0.500 dances."]
    assert "A cow" not in text
    assert "A pig" not in text


def test_places_name_only_what_is_there(tmp_path):
    # kills: paths of files that do not exist
    write(tmp_path, LOG, ROWS)
    summary = run_summary(tmp_path)
    assert str(tmp_path / LOG_FILE) in summary
    assert str(tmp_path / COMPLETIONS_FILE) in summary
    assert "config.json" not in summary
    (tmp_path / "config.json").touch()
    assert str(tmp_path / "config.json") in run_summary(tmp_path)
    (tmp_path / "adapter_config.json").touch()
    assert str(tmp_path / "adapter_config.json") in run_summary(str(tmp_path))


def test_folder_without_log_is_refused_with_its_name(tmp_path):
    # kills: a bare FileNotFoundError of open
    for folder in (tmp_path, tmp_path / "absent"):
        with pytest.raises(FileNotFoundError) as info:
            run_summary(folder)
        assert str(folder) in str(info.value)
        assert LAST_CHANCE in str(info.value)


@pytest.mark.parametrize("log", [[], LOG[:1], LOG[1:2], LOG[:2], LOG[1:4]])
def test_logs_of_short_runs(log, tmp_path):
    # kills: an IndexError for a run without evaluation, or that ended early
    summary = run_summary(write(tmp_path, log))
    assert "Saved:" in summary
    assert ("Training prompts" in summary) == any("score" in line for line in log)
    assert "Held-out prompts" not in summary


def test_chat_shows_the_last_message(tmp_path):
    # kills: the repr of a list of messages, the system prompt shown instead of the question
    prompt = [{"role": "system", "content": "Be nice."}, {"role": "user", "content": "How are you?"}]
    rows = [
        row("eval", iteration, prompt, [{"role": "assistant", "content": text}])
        for iteration, text in ((0, "Bad."), (3, "Fine."))
    ]
    summary = run_summary(write(tmp_path, LOG, rows))
    lines = [" ".join(line.split()) for line in summary.splitlines()]
    start = lines.index("How are you?")
    assert lines[start + 1 : start + 3] == ["before 1.00 0.000 Bad.", "after 1.00 0.000 Fine."]
    assert "role" not in summary


def layout(folder, prompt, before, after):
    """Lines of the block that shows one prompt before and after."""
    write(folder, LOG, [row("eval", 0, prompt, before), row("eval", 3, prompt, after)])
    summary = run_summary(folder)
    block = summary.split("before and after (score", 1)[1].split("\n\nSaved:")[0]
    return block.split("\n")[2:]


def test_newlines_and_nothing_do_not_break_the_layout(tmp_path):
    # kills: newlines of a text printed as they are, an empty line for an empty completion
    lines = layout(tmp_path, "Line one\nline two\n", "\n\n", "a\n\nb")
    assert [" ".join(line.split()) for line in lines] == [
        r"Line one\nline two\n", r"before 1.00 0.000 \n\n", r"after 1.00 0.000 a\n\nb"
    ]  # fmt: skip
    lines = layout(tmp_path, "Prompt", "", "   ")
    assert [line.split()[-1] for line in lines] == ["Prompt", "(nothing)", "(nothing)"]


def test_long_completions_are_wrapped_under_themselves(tmp_path):
    # kills: width ignored, the continuation starting at the margin
    lines = layout(tmp_path, "Prompt", "word " * 60, "x" * 300)
    assert max(map(len, lines)) <= 100
    column = lines[1].index("word")
    assert lines[2].startswith(" " * column + "word")


def test_summary_of_a_real_run(tokenizer, config_factory):
    # kills: names of the log and of the summary drifting apart
    args = config_factory(num_iterations=2, log_completions=1)
    trainer = make_trainer(args, tokenizer)
    trainer.train()
    summary = run_summary(args.output_dir)
    first, last = (log for log in trainer.state.log_history if "score" in log)
    before, after = (log for log in trainer.state.log_history if "eval_score" in log)
    squeezed = " ".join(summary.split())
    assert f"score {first['score']:.2f} {last['score']:.2f}" in squeezed
    assert f"score {before['eval_score']:.2f} {after['eval_score']:.2f}" in squeezed
    assert all(f"  {text[:5]}\n" in summary for text in TEXTS)
    assert pairs(summary) == 3
    assert "adapter_config.json" in summary


def test_summary_of_a_real_chat(config_factory):
    # kills: completions of chats in a form that the summary cannot show
    tokenizer = make_tokenizer()
    tokenizer.chat_template = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}<assistant>"
    args = config_factory(num_iterations=1)
    trainer = make_trainer(args, tokenizer, [{"prompt": [{"role": "user", "content": text[:5]}]} for text in TEXTS])
    trainer.train()
    assert all(f"  {text[:5]}\n" in run_summary(args.output_dir) for text in TEXTS)


def pairs(summary):
    """Prompts that a summary shows a completion before and one after training of."""
    labels = [line.split()[0] for line in summary.splitlines() if line.startswith(("    before ", "     after "))]
    assert labels == ["before", "after"] * (len(labels) // 2)
    return len(labels) // 2


def make_trainer(args, tokenizer, rows=None):
    rows = rows or [{"prompt": text[:5]} for text in TEXTS]
    return PPOTrainer(
        make_model("llama"),
        lambda completions, **kwargs: [float(i) for i in range(len(completions))],
        args,
        rows,
        eval_dataset=rows,
        processing_class=tokenizer,
        peft_config=make_lora("llama"),
    )


# Found by breaking it


@pytest.mark.parametrize("when", ["before", "after"])
def test_summary_of_a_run_that_was_also_evaluated_by_hand(when, tokenizer, config_factory):
    # kills: two evaluations at one iteration: "zip() argument 2 is longer than argument 1"
    args = config_factory(num_iterations=1)
    trainer = make_trainer(args, tokenizer)
    if when == "before":
        trainer.evaluate()
    trainer.train()
    if when == "after":
        trainer.evaluate()
    assert pairs(run_summary(args.output_dir)) == 3


def test_summary_after_an_evaluation_on_other_prompts(tokenizer, config_factory):
    # kills: before and after paired by position although the prompts differ
    args = config_factory(num_iterations=1)
    trainer = make_trainer(args, tokenizer)
    trainer.train()
    trainer.evaluate([{"prompt": "Something else"}])
    assert "The same held-out prompts" in run_summary(args.output_dir)


@pytest.mark.parametrize("separator", ["\u2028", "\u2029", "\x85"])
def test_line_separators_of_unicode_in_a_text(separator, tmp_path):
    # kills: str.splitlines in read_jsonl, which cuts a JSON line at a character inside a text
    rows = [row("eval", 0, "a", f"x{separator}y")]
    write(tmp_path, LOG, rows)
    assert read_jsonl(tmp_path / COMPLETIONS_FILE) == rows


@pytest.mark.parametrize("newline", ["\r\n", "\r", "\u2028", "\x0b", "\x0c", "\t"])
def test_other_newlines_do_not_break_the_layout(newline, tmp_path):
    # kills: only \n escaped, so that a carriage return overwrites the line and a tab moves the columns
    lines = layout(tmp_path, f"one{newline}two", f"three{newline}four", "five")
    assert len(lines) == 3
    assert [c for line in lines for c in line if not c.isprintable()] == []


def test_control_characters_do_not_reach_the_terminal(tmp_path):
    # kills: an escape sequence that a model wrote changing the colours of the user's terminal
    lines = layout(tmp_path, "one\x1b[31mtwo", "three\x1b[2Jfour", "five\x00")
    assert [c for line in lines for c in line if not c.isprintable()] == []


def test_long_prompts_are_wrapped_too(tmp_path):
    # kills: WIDTH kept for completions only
    assert max(map(len, layout(tmp_path, "word " * 60, "a", "b"))) <= 100


def test_log_cut_off_by_a_kill_is_still_told(tmp_path):
    # kills: a bare JSONDecodeError for half a line at the end
    write(tmp_path, LOG, ROWS)
    with (tmp_path / LOG_FILE).open("a") as file:
        file.write('{"iteration": 4, "sco')
    assert "Training prompts" in run_summary(tmp_path)


def test_log_without_completions_file_is_still_told(tmp_path):
    # kills: a bare FileNotFoundError although completions are optional everywhere else
    write(tmp_path, LOG, ROWS)
    (tmp_path / COMPLETIONS_FILE).unlink()
    assert "Held-out prompts" in run_summary(tmp_path)


def test_numbers_that_were_not_finite(tmp_path):
    # kills: null, which the log writes for NaN, formatted as a number
    log = [*LOG[:3], {"iteration": 3, **numbers(score=None, ref_kl=None)}]
    rows = [{**entry, "ref_kl": None} for entry in ROWS]
    assert "Training prompts" in run_summary(write(tmp_path, log, rows))


def test_held_out_numbers_are_those_of_the_same_prompts(tokenizer, config_factory):
    # kills: an evaluation of other prompts told apart by their number only
    args = config_factory(num_iterations=1)
    trainer = make_trainer(args, tokenizer)
    trainer.reward_funcs._funcs[0] = lambda prompts, **kwargs: [100.0 if "else" in text else 1.0 for text in prompts]
    trainer.train()
    trainer.evaluate([{"prompt": f"Something else {i}"} for i in range(3)])
    held_out = run_summary(args.output_dir).split("Held-out prompts")[1]
    assert held_out.splitlines()[1].split() == ["score", "1.00", "1.00"]


def test_chats_that_differ_before_the_last_message_are_not_paired(tmp_path):
    # kills: prompts told apart by their last message
    def chat(system):
        return [{"role": "system", "content": system}, {"role": "user", "content": "Why?"}]

    rows = [row("eval", i, chat(s), f"{s} {i}") for i in (0, 3) for s in ("kind", "rude")]
    lines = run_summary(write(tmp_path, LOG, rows)).splitlines()
    words = [line.split()[-2:] for line in lines if line.split()[:1] in (["before"], ["after"])]
    assert words == [["kind", "0"], ["kind", "3"], ["rude", "0"], ["rude", "3"]]


@pytest.mark.parametrize("text", ["prix\u00a0: 3", "\u6771\u4eac\u3000\u5927\u962a", "\U0001f469\u200d\U0001f680"])
def test_readable_text_is_shown_as_it_is(text, tmp_path):
    # kills: no-break and ideographic spaces and joined emoji shown as \\xa0, \\u3000, \\u200d
    assert "\\" not in "".join(layout(tmp_path, text, text, text))
