"""What a run tells the outside: events, the log on disk, the terminal, the trackers."""

import dataclasses
import json
import sys
import warnings
from pathlib import Path

import pytest
import torch
from conftest import TEXTS, make_lora, make_model
from transformers import PrinterCallback, TrainerCallback, TrainerControl

from rlhf_kit import PPOConfig, PPOTrainer
from rlhf_kit.callbacks import COMPLETIONS_FILE, CONFIG_FILE, LOG_FILE, CallbackList

PROMPTS = [{"prompt": text[:9]} for text in TEXTS]


def count_letters(completions, **kwargs):
    return [float(sum(c.isalpha() for c in text)) for text in completions]


def make_trainer(args, tokenizer, reward=count_letters, **kwargs):
    return PPOTrainer(
        make_model("llama"),
        reward,
        args,
        PROMPTS,
        processing_class=tokenizer,
        peft_config=make_lora("llama"),
        **kwargs,
    )


def strict_lines(path):
    def refuse(constant):
        raise AssertionError(f"{constant} is not JSON")

    return [json.loads(line, parse_constant=refuse) for line in path.read_text(encoding="utf-8").split("\n")[:-1]]


class Recorder(TrainerCallback):
    """Notes every event, the iteration it came in, and what came with it."""

    def __init__(self):
        self.events = []
        self.given = {}

    def __getattribute__(self, name):
        if not name.startswith("on_"):
            return super().__getattribute__(name)

        def record(args, state, control, **kwargs):
            self.events.append((name, state.iteration))
            self.given.setdefault(name, []).append(kwargs)

        return record

    def names(self):
        return [name for name, _ in self.events]


class StopAt(TrainerCallback):
    """Ends training once an iteration is done."""

    def __init__(self, iteration):
        self.iteration = iteration

    def on_step_end(self, args, state, control, **kwargs):
        if state.iteration == self.iteration:
            control.should_training_stop = True


# Events


def test_events_come_in_order_with_their_iteration(tokenizer, config_factory):
    # kills: on_log before the iteration is counted, on_evaluate missing, on_train_end before the model is saved
    recorder = Recorder()
    args = config_factory(eval_every=1, save_every=2)
    trainer = make_trainer(args, tokenizer, callbacks=[recorder], eval_dataset=PROMPTS[:1])
    assert recorder.names() == ["on_init_end"]
    trainer.train()
    assert recorder.events == [
        ("on_init_end", 0),
        ("on_train_begin", 0), ("on_log", 0), ("on_evaluate", 0),
        ("on_step_begin", 0), ("on_step_end", 1), ("on_log", 1), ("on_log", 1), ("on_evaluate", 1),
        ("on_step_begin", 1), ("on_step_end", 2), ("on_log", 2), ("on_log", 2), ("on_evaluate", 2),
        ("on_save", 2), ("on_train_end", 2),
    ]  # fmt: skip


def test_events_carry_logs_completions_and_the_parts_of_the_trainer(tokenizer, config_factory):
    # kills: logs without completions, completions of another iteration, model or optimizer missing
    recorder = Recorder()
    trainer = make_trainer(
        config_factory(log_completions=3), tokenizer, callbacks=[recorder], eval_dataset=PROMPTS[:2]
    )
    trainer.train()
    for name, events in recorder.given.items():
        for given in events:
            assert given["model"] is trainer.model, name
            assert given["processing_class"] is tokenizer
            assert given["optimizer"] is trainer.updater.optimizer
            assert given["lr_scheduler"] is trainer.updater.lr_scheduler
    before, first, second, after = recorder.given["on_log"]
    assert [len(log["completions"]) for log in (before, first, second, after)] == [2, 3, 3, 2]
    for log in (before, first, second, after):
        kind = "eval" if "eval_score" in log["logs"] else "train"
        expected = {(kind, log["logs"]["iteration"])}
        assert {(row["split"], row["iteration"]) for row in log["completions"]} == expected
    assert {"score", "ref_kl", "kl_coef", "tokens_per_second"} <= set(first["logs"])
    assert [log["logs"] for log in recorder.given["on_log"]] == trainer.state.log_history
    assert "eval_score" in recorder.given["on_evaluate"][0]["metrics"]


def test_model_is_saved_before_training_ends(tokenizer, config_factory):
    # kills: on_train_end emitted before save_model
    class Look(TrainerCallback):
        def on_train_end(self, args, state, control, **kwargs):
            self.found = (Path(args.output_dir) / "adapter_model.safetensors").exists()

    look = Look()
    make_trainer(config_factory(num_iterations=1), tokenizer, callbacks=[look]).train()
    assert look.found


def test_callback_can_end_training_after_its_iteration(tokenizer, config_factory):
    # kills: should_training_stop ignored, or looked at one iteration too late
    recorder = Recorder()
    trainer = make_trainer(config_factory(num_iterations=5), tokenizer, callbacks=[StopAt(2), recorder])
    trainer.train()
    assert trainer.state.iteration == 2
    assert recorder.events[-3:] == [("on_step_end", 2), ("on_log", 2), ("on_train_end", 2)]
    assert (Path(trainer.args.output_dir) / "adapter_model.safetensors").exists()


def test_callback_given_as_class_and_a_callback_of_transformers(tokenizer, config_factory, capsys):
    # kills: classes passed through uncalled; events whose arguments transformers' own callbacks cannot take
    trainer = make_trainer(config_factory(num_iterations=1), tokenizer, callbacks=[PrinterCallback])
    trainer.train()
    assert "'score'" in capsys.readouterr().out


@pytest.mark.parametrize("bad", [print, 5, "tensorboard", object()])
def test_what_is_no_callback_is_refused(bad, tokenizer, config_factory):
    # kills: duck typing that fails at the first event
    with pytest.raises(TypeError, match=r"callbacks must be transformers\.TrainerCallback objects, got"):
        make_trainer(config_factory(), tokenizer, callbacks=[bad])


def test_callbacks_are_called_in_their_order():
    # kills: a set of callbacks, reversed order
    calls = []

    class Note(TrainerCallback):
        def __init__(self, name):
            self.name = name

        def on_log(self, args, state, control, **kwargs):
            calls.append((self.name, kwargs))

    run = CallbackList([Note("a"), Note("b"), Note("c")], model="m")
    run("on_log", None, None, TrainerControl(), logs={})
    assert calls == [(name, {"model": "m", "logs": {}}) for name in "abc"]


# The log on disk


@pytest.mark.parametrize(
    ("every", "total", "expected"),
    [(1, 3, [1, 2, 3]), (3, 7, [1, 3, 6, 7]), (4, 4, [1, 4]), (10, 3, [1, 3]), (5, 1, [1])],
)
def test_log_has_one_line_per_logged_iteration(every, total, expected, tokenizer, config_factory, tmp_path):
    # kills: log_every ignored, the first or the last iteration left out
    args = config_factory(log_every=every, num_iterations=total, ppo_epochs=1, rollout_batch_size=2, mini_batch_size=2)
    make_trainer(args, tokenizer).train()
    logs = strict_lines(tmp_path / "run" / LOG_FILE)
    assert [log["iteration"] for log in logs] == expected
    assert [log["episodes"] for log in logs] == [2 * iteration for iteration in expected]
    assert [log["global_step"] for log in logs] == expected


def test_log_lines_are_written_as_they_come(tokenizer, config_factory, tmp_path):
    # kills: a log written at the end only, lost when the run is killed
    lengths = []

    class Look(TrainerCallback):
        def on_log(self, args, state, control, **kwargs):
            lengths.append(len(strict_lines(tmp_path / "run" / LOG_FILE)))

    make_trainer(config_factory(num_iterations=3), tokenizer, callbacks=[Look()]).train()
    assert lengths == [1, 2, 3]


def test_completions_file_holds_the_rows_of_logged_iterations(tokenizer, config_factory, tmp_path):
    # kills: log_completions ignored, rows of iterations that were not logged, evaluation rows cut
    args = config_factory(log_completions=2, log_every=3, num_iterations=4, rollout_batch_size=4)
    make_trainer(args, tokenizer, eval_dataset=PROMPTS).train()
    rows = strict_lines(tmp_path / "run" / COMPLETIONS_FILE)
    assert [(row["split"], row["iteration"]) for row in rows] == [
        *[("eval", 0)] * 3, *[("train", 1)] * 2, *[("train", 3)] * 2, *[("train", 4)] * 2, *[("eval", 4)] * 3
    ]  # fmt: skip
    assert [row["prompt"] for row in rows[:3]] == [row["prompt"] for row in PROMPTS]
    for row in rows:
        assert row["score"] == count_letters([row["completion"]])[0]
        assert row["prompt"] in {prompt["prompt"] for prompt in PROMPTS}


def test_more_completions_than_there_are(tokenizer, config_factory, tmp_path):
    # kills: an IndexError
    make_trainer(config_factory(log_completions=100, num_iterations=1), tokenizer).train()
    assert len(strict_lines(tmp_path / "run" / COMPLETIONS_FILE)) == 8


def test_no_completions_when_none_are_wanted(tokenizer, config_factory, tmp_path):
    # kills: 0 taken for "all", evaluations writing theirs nevertheless
    recorder = Recorder()
    make_trainer(config_factory(log_completions=0), tokenizer, eval_dataset=PROMPTS[:1], callbacks=[recorder]).train()
    assert all(log["completions"] == [] for log in recorder.given["on_log"])
    file = tmp_path / "run" / COMPLETIONS_FILE
    assert not file.exists() or file.read_text() == ""
    assert len(strict_lines(tmp_path / "run" / LOG_FILE)) == 4


def test_config_file_gives_the_config_back(tokenizer, config_factory, tmp_path):
    # kills: fields left out of the file or written as text
    args = config_factory(stop=["x", "\u00e9"], report_to=None, reward_weights=[2])
    make_trainer(args, tokenizer, eval_dataset=PROMPTS[:1]).evaluate()
    assert PPOConfig(**json.loads((tmp_path / "run" / CONFIG_FILE).read_text())) == args


def test_step_loop_is_logged_too(tokenizer, config_factory, tmp_path):
    # kills: logging only inside train()
    trainer = make_trainer(config_factory(log_completions=2), tokenizer)
    queries = [torch.tensor([5, 6])] * 8
    for _ in range(2):
        trainer.step(queries, trainer.generate(queries), [1.0] * 8)
    assert [log["iteration"] for log in strict_lines(tmp_path / "run" / LOG_FILE)] == [1, 2]
    assert len(strict_lines(tmp_path / "run" / COMPLETIONS_FILE)) == 4


# The terminal


def test_one_line_per_logged_iteration_when_not_on_a_terminal(tokenizer, config_factory, capsys):
    # kills: a bar in log files, lines on stderr, numbers of another iteration
    args = config_factory(num_iterations=4, log_every=3)
    trainer = make_trainer(args, tokenizer, eval_dataset=PROMPTS[:1])
    capsys.readouterr()
    trainer.train()
    out, err = capsys.readouterr()
    lines = out.splitlines()
    assert [line.split("|")[0].split() for line in lines] == [
        ["eval", "0/4"], ["train", "1/4"], ["train", "3/4"], ["train", "4/4"], ["eval", "4/4"]
    ]  # fmt: skip
    for line, log in zip(lines, trainer.state.log_history, strict=True):
        prefix = "eval_" if "eval_score" in log else ""
        assert f"score {log[prefix + 'score']:8.3f}" in line
        assert f"KL {log[prefix + 'ref_kl']:7.4f} nats/token" in line
        assert f"length {log[prefix + 'completion_length']:6.1f}" in line
    assert f"entropy {trainer.state.log_history[1]['entropy']:6.3f}" in lines[1]
    assert "skipped" not in out
    assert "it/s" not in err
    assert "%|" not in err


def test_bar_shows_phases_on_a_terminal(tokenizer, config_factory, capsys, monkeypatch):
    # kills: the bar disabled everywhere, phases not shown, the bar left behind
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    monkeypatch.setattr("tqdm.std.tqdm.monitor_interval", 0)
    trainer = make_trainer(config_factory(), tokenizer)
    trainer.train()
    err = capsys.readouterr().err
    assert all(phase in err for phase in ("generate", "reward", "score", "update"))
    assert "2/2" in err
    assert trainer._journal._progress._bar is None


def test_skipped_steps_are_said(tokenizer, config_factory, capsys):
    # kills: an update that did nothing looking like any other
    trainer = make_trainer(config_factory(num_iterations=1), tokenizer)
    trainer.updater._parameters()[0].register_hook(lambda grad: grad * float("nan"))
    trainer.train()
    assert "4 optimizer steps skipped: loss or gradient not finite" in capsys.readouterr().out


# Trackers


def read_tensorboard(folder):
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    scalars = {}
    for file in sorted(Path(folder).rglob("events.out.tfevents.*")):
        events = accumulator.EventAccumulator(str(file))
        events.Reload()
        for tag in events.Tags()["scalars"]:
            scalars.setdefault(tag, []).extend((event.step, event.value) for event in events.Scalars(tag))
    return scalars


def test_tensorboard_holds_every_number_of_the_log(tokenizer, config_factory):
    # kills: trackers not started, not fed, not flushed, or fed with other steps than iterations
    args = config_factory(report_to=["tensorboard"], num_iterations=3)
    trainer = make_trainer(args, tokenizer, eval_dataset=PROMPTS[:1])
    trainer.train()
    scalars = read_tensorboard(args.output_dir)
    expected = {}
    for log in trainer.state.log_history:
        for name, value in log.items():
            expected.setdefault(name, []).append((log["iteration"], pytest.approx(value, rel=1e-6)))
    assert scalars == expected
    assert [step for step, _ in scalars["score"]] == [1, 2, 3]
    assert [step for step, _ in scalars["eval_score"]] == [0, 3]


def test_without_report_to_nothing_but_the_log_is_written(tokenizer, config_factory, tmp_path):
    # kills: Accelerate's log_with="all" by default
    trainer = make_trainer(config_factory(), tokenizer)
    trainer.train()
    assert trainer.accelerator.trackers == []
    assert list((tmp_path / "run").rglob("events.out.*")) == []


def test_unknown_tracker_is_refused_with_the_known_ones(tokenizer, config_factory):
    # kills: a misspelt tracker ignored
    with pytest.raises(ValueError, match=r"tensorbord.*tensorboard"):
        make_trainer(config_factory(report_to=["tensorbord"]), tokenizer)


@pytest.fixture
def wandb_files(tmp_path, monkeypatch):
    wandb = pytest.importorskip("wandb")
    folder = tmp_path / "wandb"
    folder.mkdir()
    for name, value in {"MODE": "offline", "DIR": folder, "SILENT": "true", "CONSOLE": "off"}.items():
        monkeypatch.setenv(f"WANDB_{name}", str(value))
    yield folder
    wandb.teardown()  # it would keep this folder for the runs of later tests


def test_wandb_gets_metrics_config_and_a_table_of_completions(wandb_files, tokenizer, config_factory):
    # kills: the run without name, completions not sent, metrics not sent
    args = config_factory(report_to=["wandb"], log_completions=2, num_iterations=1, run_name="first-try")
    trainer = make_trainer(args, tokenizer)
    trainer.train()
    trainer.accelerator.end_training()
    sys.modules["wandb"].teardown()  # its service has written everything once it is gone
    (record,) = wandb_files.rglob("*.wandb")
    content = record.read_bytes()
    assert b"\x09first-try" in content  # a string field of its own: the name, not the copy in the config
    assert all(text in content for text in (b"ref_kl_per_completion", b"kl_estimator"))
    (table,) = wandb_files.rglob("completions_*.table.json")
    table = json.loads(table.read_text())
    assert table["columns"] == ["split", "iteration", "prompt", "completion", "score", "ref_kl", "length", "ended",
                                "reward/count_letters"]  # fmt: skip
    assert [row[0] for row in table["data"]] == ["train", "train"]


def test_trackio_gets_metrics(tmp_path, monkeypatch, tokenizer, config_factory):
    # kills: trackio's keyword arguments refused by its init
    monkeypatch.setenv("TRACKIO_DIR", str(tmp_path / "trackio"))
    utils = pytest.importorskip("trackio.utils")
    if str(utils.TRACKIO_DIR) != str(tmp_path / "trackio"):
        pytest.skip("trackio was imported before, with a folder outside this test")
    args = config_factory(report_to=["trackio"], run_name="first-try", num_iterations=2)
    trainer = make_trainer(args, tokenizer)
    trainer.train()
    trainer.accelerator.end_training()
    import trackio

    (run,) = trackio.Api().runs("rlhf_kit")
    assert run.name == "first-try"
    storage = pytest.importorskip("trackio.sqlite_storage").SQLiteStorage
    logs = storage.get_logs("rlhf_kit", "first-try")
    assert [log["score"] for log in logs if "score" in log] == [log["score"] for log in trainer.state.log_history]


# Found by breaking it


def test_the_last_iteration_of_a_run_stopped_by_a_callback_is_logged(tokenizer, config_factory, tmp_path):
    # kills: "The first and last always log", kept for the last planned iteration only
    args = config_factory(num_iterations=9, log_every=5)
    make_trainer(args, tokenizer, callbacks=[StopAt(3)]).train()
    assert [log["iteration"] for log in strict_lines(tmp_path / "run" / LOG_FILE)] == [1, 3]


def test_a_run_stopped_by_a_callback_is_evaluated_at_its_end(tokenizer, config_factory):
    # kills: "None = before the first and after the last": no evaluation of the model that was saved
    trainer = make_trainer(
        config_factory(num_iterations=9), tokenizer, callbacks=[StopAt(3)], eval_dataset=PROMPTS[:1]
    )
    trainer.train()
    assert [log["iteration"] for log in trainer.state.log_history if "eval_score" in log] == [0, 3]


def test_training_can_go_on_after_a_callback_stopped_it(tokenizer, config_factory):
    # kills: the stop flag never cleared, so that a second train() does nothing without a word (transformers clears it)
    trainer = make_trainer(config_factory(num_iterations=4), tokenizer, callbacks=[StopAt(2)])
    trainer.train()
    trainer.train()
    assert trainer.state.iteration == 4


def test_a_control_returned_by_a_callback_counts(tokenizer, config_factory):
    # kills: the return value dropped; transformers takes it as the new control
    class Stop(TrainerCallback):
        def on_step_end(self, args, state, control, **kwargs):
            return dataclasses.replace(control, should_training_stop=True)

    trainer = make_trainer(config_factory(num_iterations=4), tokenizer, callbacks=[Stop()])
    trainer.train()
    assert trainer.state.iteration == 1


def test_a_callback_can_ask_for_an_evaluation(tokenizer, config_factory):
    # kills: control.should_evaluate ignored without a word
    class Ask(TrainerCallback):
        def on_step_end(self, args, state, control, **kwargs):
            control.should_evaluate = state.iteration == 2

    trainer = make_trainer(config_factory(num_iterations=4), tokenizer, callbacks=[Ask()], eval_dataset=PROMPTS[:1])
    trainer.train()
    assert [log["iteration"] for log in trainer.state.log_history if "eval_score" in log] == [0, 2, 4]


def test_one_callback_without_a_list_is_taken_or_refused_clearly(tokenizer, config_factory):
    # kills: "Value after * must be an iterable, not Recorder"
    try:
        make_trainer(config_factory(), tokenizer, callbacks=Recorder())
    except TypeError as error:
        assert "callbacks" in str(error)  # noqa: PT017


def test_log_stays_strict_json_when_a_number_is_not_finite(tokenizer, config_factory, tmp_path):
    # kills: NaN in log.jsonl, which no other JSON reader accepts
    trainer = make_trainer(config_factory(num_iterations=1), tokenizer)
    record = trainer._record

    def broken(*args, **kwargs):
        rollout = record(*args, **kwargs)
        rollout.ref_kl[0, 0] = float("nan")
        return rollout

    trainer._record = broken
    trainer.train()
    assert len(strict_lines(tmp_path / "run" / LOG_FILE)) == 1
    strict_lines(tmp_path / "run" / COMPLETIONS_FILE)


def test_a_tracker_that_is_not_installed_is_not_dropped_in_silence(tokenizer, config_factory):
    # kills: report_to=["tensorboard", "dvclive"] running with TensorBoard alone
    try:
        import dvclive  # noqa: F401
    except ImportError:
        pass
    else:
        pytest.skip("dvclive is installed")
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            make_trainer(config_factory(report_to=["tensorboard", "dvclive"]), tokenizer)
        except (ImportError, ValueError) as error:
            assert "dvclive" in str(error)  # noqa: PT017
            return
    assert [w for w in caught if "dvclive" in str(w.message)]


def test_evaluation_after_training_works_with_wandb(wandb_files, tokenizer, config_factory):
    # kills: "Run (...) is finished. The call to `log` will be ignored", raised as an error
    trainer = make_trainer(config_factory(report_to=["wandb"], num_iterations=1), tokenizer)
    trainer.train()
    assert "eval_score" in trainer.evaluate(PROMPTS[:1])
    trainer.accelerator.end_training()


def test_run_name_is_seen_in_tensorboard(tokenizer, config_factory):
    # kills: a setting that only two trackers get: runs of one folder tree are all called "rlhf_kit"
    args = config_factory(report_to=["tensorboard"], run_name="first-try", num_iterations=1)
    make_trainer(args, tokenizer).train()
    assert [file for file in Path(args.output_dir).rglob("events.out.tfevents.*") if "first-try" in str(file)]


def test_the_last_iteration_is_logged_when_an_evaluation_ends_the_run(tokenizer, config_factory):
    # kills: the decision to log taken before on_evaluate, where early stopping sets should_training_stop
    class Stop(TrainerCallback):
        def on_evaluate(self, args, state, control, **kwargs):
            control.should_training_stop = state.iteration == 2

    args = config_factory(num_iterations=9, log_every=5, eval_every=2)
    trainer = make_trainer(args, tokenizer, callbacks=[Stop()], eval_dataset=PROMPTS[:1])
    trainer.train()
    assert [log["iteration"] for log in trainer.state.log_history if "score" in log] == [1, 2]


def test_step_loop_has_the_events_of_an_iteration(tokenizer, config_factory):
    # kills: on_step_end without on_step_begin
    recorder = Recorder()
    trainer = make_trainer(config_factory(), tokenizer, callbacks=[recorder])
    queries = [torch.tensor([5, 6])] * 8
    trainer.step(queries, trainer.generate(queries), [1.0] * 8)
    names = recorder.names()
    assert names.count("on_step_begin") == names.count("on_step_end")
