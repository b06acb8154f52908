"""Prompts: formats, refusals with row and numbers, order, padding."""

import copy
import random
from collections import Counter

import datasets
import numpy as np
import pytest
import torch
from conftest import make_lora, make_model, make_tokenizer
from tokenizers.processors import TemplateProcessing

from rlhf_kit import PPOTrainer
from rlhf_kit.data import PromptDataset, pad_left, pad_right, prompt_order

TEMPLATE = (
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}</>{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)
USER = [{"role": "user", "content": "Hi there"}]
SYSTEM = [{"role": "system", "content": "Be brief."}, *USER]
PREFILLED = [*USER, {"role": "assistant", "content": "Well,"}]


@pytest.fixture(scope="module")
def chat_tokenizer():
    tokenizer = make_tokenizer()
    tokenizer.chat_template = TEMPLATE
    return tokenizer


def load(dataset, tokenizer, **settings):
    return PromptDataset(dataset, tokenizer, **{"max_completion_length": 6, **settings})


def everything(dataset, tokenizer, **settings):
    prompts = load(dataset, tokenizer, **settings)
    return prompts.batch(range(len(prompts)))


def rows_of(n, **columns):
    return [{"prompt": f"prompt {i}", **{k: f"{v}{i}" for k, v in columns.items()}} for i in range(n)]


# Formats


def test_text_prompts_become_their_tokens(tokenizer):
    # kills: prompts padded, truncated or reordered
    batch = everything([{"prompt": "Hello"}, {"prompt": "The quick brown fox"}], tokenizer)
    assert batch.prompts == ["Hello", "The quick brown fox"]
    assert batch.prompt_ids == [tokenizer("Hello").input_ids, tokenizer("The quick brown fox").input_ids]
    assert batch.columns == {}
    assert len(batch) == 2


def test_text_prompts_get_the_special_tokens_of_the_tokenizer():
    # kills: add_special_tokens=False for text, which loses the BOS token
    tokenizer = with_bos(make_tokenizer())
    assert everything([{"prompt": "Hello"}], tokenizer).prompt_ids[0][0] == 0


def with_bos(tokenizer):
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(single="<eos> $A", special_tokens=[("<eos>", 0)])
    return tokenizer


def test_chat_prompts_are_rendered_up_to_the_answer(chat_tokenizer):
    # kills: add_generation_prompt dropped, the system message dropped
    batch = everything([{"prompt": SYSTEM}, {"prompt": USER}], chat_tokenizer)
    assert [chat_tokenizer.decode(ids) for ids in batch.prompt_ids] == [
        "<system>Be brief.</><user>Hi there</><assistant>",
        "<user>Hi there</><assistant>",
    ]
    assert batch.prompts == [SYSTEM, USER]  # rewards see messages, not the rendered text


def test_chat_that_ends_with_the_assistant_is_continued(chat_tokenizer):
    # kills: a second assistant turn opened after a prefilled answer, or the turn closed
    batch = everything([{"prompt": PREFILLED}], chat_tokenizer)
    assert chat_tokenizer.decode(batch.prompt_ids[0]) == "<user>Hi there</><assistant>Well,"


def test_chat_gets_the_bos_token_once():
    # kills: add_special_tokens=True for a template that wrote BOS itself
    tokenizer = with_bos(make_tokenizer())
    tokenizer.chat_template = "<eos>" + TEMPLATE
    assert Counter(everything([{"prompt": USER}], tokenizer).prompt_ids[0])[0] == 1


def test_template_arguments_of_a_row_reach_the_template():
    # kills: TEMPLATE_COLUMNS reduced to the prompt
    tokenizer = make_tokenizer()
    tokenizer.chat_template = "{{ shout }}" + TEMPLATE
    batch = everything([{"prompt": USER, "chat_template_kwargs": {"shout": "HEY"}}], tokenizer)
    assert tokenizer.decode(batch.prompt_ids[0]) == "HEY<user>Hi there</><assistant>"
    assert batch.columns == {"chat_template_kwargs": [{"shout": "HEY"}]}


def test_chat_without_template_is_refused(tokenizer):
    # kills: messages turned into text by str()
    with pytest.raises(ValueError, match=r"row 0 is a chat, but .* has no chat template.*give prompts as text"):
        load([{"prompt": USER}], tokenizer)


@pytest.mark.parametrize("kind", [list, tuple, datasets.Dataset.from_list])
def test_lists_and_datasets_give_the_same(kind, chat_tokenizer):
    # kills: one of the two formats unsupported
    rows = [{"prompt": SYSTEM, "answer": 4, "tags": ["a"]}, {"prompt": USER, "answer": 5, "tags": []}]
    batch = everything(kind(rows), chat_tokenizer)
    assert batch.prompts == [SYSTEM, USER]
    assert batch.columns == {"answer": [4, 5], "tags": [["a"], []]}


def test_columns_stay_with_their_prompt_in_any_order(tokenizer):
    # kills: columns sliced by position in the batch, duplicates removed
    prompts = load(rows_of(5, answer="a", source="s"), tokenizer)
    assert sorted(prompts.column_names) == ["answer", "source"]
    batch = prompts.batch([3, 0, 3, np.int64(4)])
    assert batch.prompts == ["prompt 3", "prompt 0", "prompt 3", "prompt 4"]
    assert batch.columns == {"answer": ["a3", "a0", "a3", "a4"], "source": ["s3", "s0", "s3", "s4"]}
    assert batch.prompt_ids == [tokenizer(text).input_ids for text in batch.prompts]


def test_raw_text_is_cut_to_its_first_tokens(tokenizer):
    # kills: the last tokens taken, the whole text shown to rewards, the text column dropped
    texts = ["The quick brown fox jumps over the lazy dog.", "She", "One small step for a man"]
    batch = everything([{"text": t, "id": i} for i, t in enumerate(texts)], tokenizer, text_prompt_length=4)
    full = [tokenizer(text).input_ids for text in texts]
    assert batch.prompt_ids == [ids[:4] for ids in full]
    assert [len(ids) for ids in batch.prompt_ids] == [4, len(full[1]), 4]
    assert len(full[1]) < 4  # a text shorter than the prompt is used whole
    assert batch.prompts == [tokenizer.decode(ids[:4]) for ids in full]
    assert batch.columns == {"text": texts, "id": [0, 1, 2]}


def test_prompt_cut_from_text_shows_no_special_tokens():
    # kills: skip_special_tokens=False
    batch = everything([{"text": "Hello world"}], with_bos(make_tokenizer()), text_prompt_length=3)
    assert batch.prompt_ids[0][0] == 0
    assert "<eos>" not in batch.prompts[0]
    assert "Hello".startswith(batch.prompts[0][:3])


def test_prompt_may_hold_the_end_token(tokenizer):
    # kills: prompts cut at, or masked by, the id that also pads
    assert everything([{"prompt": "a<eos>b"}], tokenizer).prompt_ids[0].count(0) == 1


# Refusals

SPLITS = datasets.DatasetDict({"train": datasets.Dataset.from_list(rows_of(2))})


@pytest.mark.parametrize(
    ("dataset", "name"),
    [
        (SPLITS, "DatasetDict"),
        (SPLITS["train"].to_iterable_dataset(), "IterableDataset"),
        (datasets.IterableDatasetDict({"train": SPLITS["train"].to_iterable_dataset()}), "IterableDatasetDict"),
        ({"prompt": ["a"]}, "dict"),
        (iter(rows_of(2)), "list_iterator"),
        (5, "int"),
    ],
)
def test_datasets_without_random_access_are_refused_with_advice(dataset, name, tokenizer):
    # kills: the check on __len__ or on dict; a message without what to pass instead
    with pytest.raises(TypeError, match=rf"got {name}\..*one split.*streaming dataset, Dataset\.from_list"):
        load(dataset, tokenizer)


@pytest.mark.parametrize("dataset", [[], datasets.Dataset.from_dict({"prompt": []})])
def test_empty_dataset_is_refused(dataset, tokenizer):
    # kills: an IndexError, or a division by zero in the first iteration
    with pytest.raises(ValueError, match="dataset has no rows"):
        load(dataset, tokenizer)


def test_missing_column_is_refused_with_the_columns_there_are(tokenizer):
    # kills: a KeyError; no hint at text_prompt_length
    with pytest.raises(ValueError, match=r"no 'prompt' column; it has \['answer', 'query'\]"):
        load([{"query": "a", "answer": "b"}], tokenizer)
    with pytest.raises(ValueError, match=r"no 'prompt' column \(or set text_prompt_length.*it has \['text'\]"):
        load([{"text": "a"}], tokenizer)
    with pytest.raises(ValueError, match=r"no 'text' column; it has \['prompt'\]"):
        load([{"prompt": "a"}], tokenizer, text_prompt_length=3)


@pytest.mark.parametrize("column", ["prompt", "text"])
def test_empty_prompts_are_counted_and_the_first_is_named(column, tokenizer):
    # kills: empty prompts skipped silently or left for generate to fail on
    rows = [{column: text} for text in ("a", "", "b", "")]
    settings = {"text_prompt_length": 3} if column == "text" else {}
    with pytest.raises(ValueError, match=r"2 of 4 prompts have no tokens, first in row 1.*BOS"):
        load(rows, tokenizer, **settings)


@pytest.mark.parametrize(
    "bad",
    [None, 3, 1.5, ["a", "b"], [1, 2], {"role": "user", "content": "x"}, [{"content": "x"}], b"bytes"],
)
def test_prompt_of_a_wrong_type_is_refused_with_row_and_value(bad, chat_tokenizer):
    # kills: str(prompt), token ids taken for text
    with pytest.raises(TypeError, match="row 2: 'prompt' must be text or a list of messages") as info:
        load([{"prompt": "a"}, {"prompt": "b"}, {"prompt": bad}], chat_tokenizer)
    assert repr(bad) in str(info.value)


def test_text_of_a_wrong_type_is_refused_with_its_row(tokenizer):
    # kills: None turned into "None"
    with pytest.raises(TypeError, match="row 1: 'text' must be a string, got NoneType"):
        load([{"text": "a"}, {"text": None}], tokenizer, text_prompt_length=3)


# Lengths

LETTERS = "The quick brown fox jumps over the lazy dog."


def lengths(tokenizer, *texts):
    return [len(tokenizer(text).input_ids) for text in texts]


def test_overlong_prompts_are_refused_with_numbers(tokenizer):
    # kills: > for >=, the first instead of the longest named
    rows = [{"prompt": LETTERS[:n]} for n in (4, 44, 9, 20)]
    n = lengths(tokenizer, *(row["prompt"] for row in rows))
    assert n[1] > n[3] > n[2] > n[0]
    with pytest.raises(ValueError, match=rf"2 of 4 prompts .*max_prompt_length={n[2]} .*\({n[1]}\) in row 1.*trunc"):
        load(rows, tokenizer, max_prompt_length=n[2])
    assert len(load(rows, tokenizer, max_prompt_length=n[1])) == 4  # exactly as long as allowed


def test_truncation_keeps_the_last_tokens_and_leaves_short_prompts(tokenizer):
    # kills: the first tokens kept
    rows = [{"prompt": LETTERS}, {"prompt": "She"}]
    full = [tokenizer(row["prompt"]).input_ids for row in rows]
    batch = everything(rows, tokenizer, max_prompt_length=5, truncate_prompts=True)
    assert batch.prompt_ids == [full[0][-5:], full[1]]
    assert batch.prompts == [LETTERS, "She"]  # as in the dataset


def test_context_overflow_is_refused_with_numbers(tokenizer):
    # kills: the completion not counted, >= for >
    n = lengths(tokenizer, LETTERS)[0]
    rows = [{"prompt": "She"}, {"prompt": LETTERS}]
    with pytest.raises(ValueError, match=rf"\({n} tokens, row 1\).*max_completion_length=6 need {n + 6} .* {n + 5}:"):
        load(rows, tokenizer, context_length=n + 5)
    assert len(load(rows, tokenizer, context_length=n + 6)) == 2
    assert len(load(rows, tokenizer, context_length=None)) == 2


def test_truncation_makes_room_for_the_completion(tokenizer):
    # kills: prompts cut to the whole context, max_prompt_length overriding a smaller room
    full = tokenizer(LETTERS).input_ids
    rows = [{"prompt": LETTERS}]
    for settings, kept in (
        ({"context_length": 13}, 7),
        ({"context_length": 13, "max_prompt_length": 9}, 7),
        ({"context_length": 13, "max_prompt_length": 3}, 3),
        ({"context_length": 7}, 1),
    ):
        batch = everything(rows, tokenizer, truncate_prompts=True, **settings)
        assert batch.prompt_ids == [full[-kept:]]


@pytest.mark.parametrize("context", [5, 6])
@pytest.mark.parametrize("truncate", [True, False])
def test_completion_that_fills_the_context_is_refused(truncate, context, tokenizer):
    # kills: a limit of 0 or less, with which ids[-limit:] keeps the wrong tokens or all of them
    with pytest.raises(ValueError, match=rf"max_completion_length=6 .*context of {context}") as info:
        load([{"prompt": LETTERS}], tokenizer, truncate_prompts=truncate, context_length=context)
    assert "lower" in str(info.value)
    assert ("leaves no room" in str(info.value)) == truncate


def test_trainer_checks_prompts_against_the_context_of_the_model(tokenizer, config_factory):
    # kills: context_length not passed on
    model = make_model("llama", max_position_embeddings=16)
    args = config_factory(max_completion_length=10)
    with pytest.raises(ValueError, match="more than the model's context of 16"):
        make_trainer(args, tokenizer, [{"prompt": LETTERS}], model=model)
    trainer = make_trainer(
        config_factory(max_completion_length=10, truncate_prompts=True), tokenizer, [{"prompt": LETTERS}], model=model
    )
    assert len(trainer.train_prompts.batch([0]).prompt_ids[0]) == 6


def make_trainer(args, tokenizer, dataset, reward=lambda completions: [0.0] * len(completions), model=None):
    model = model or make_model("llama")
    return PPOTrainer(model, reward, args, dataset, processing_class=tokenizer, peft_config=make_lora("llama"))


def test_rewards_see_the_prompt_cut_from_a_text(tokenizer, config_factory):
    # kills: rewards given the whole text as prompt
    texts = [LETTERS, "She sells sea shells by the sea shore."]
    seen = {}

    def reward(prompts, completions, text):
        seen.update(zip(text, prompts, strict=True))
        return [0.0] * len(completions)

    args = config_factory(text_prompt_length=5, num_iterations=1)
    make_trainer(args, tokenizer, [{"text": t} for t in texts], reward).train()
    assert seen == {text: tokenizer.decode(tokenizer(text).input_ids[:5]) for text in texts}


# Order


def order(iteration, *, batch_size=4, num_prompts=7, seed=0):
    return prompt_order(seed=seed, iteration=iteration, batch_size=batch_size, num_prompts=num_prompts)


def test_seven_prompts_in_batches_of_four_come_equally_often():
    # kills: the tail of a pass dropped, a pass started anew in every iteration
    counts = Counter(i for iteration in range(7) for i in order(iteration))
    assert counts == dict.fromkeys(range(7), 4)


@pytest.mark.parametrize(("batch_size", "num_prompts"), [(4, 7), (7, 7), (3, 9), (10, 3), (1, 5), (5, 1)])
def test_each_pass_is_a_permutation_and_passes_differ(batch_size, num_prompts):
    # kills: sampling with replacement, the same order in every pass
    iterations = 6 * num_prompts
    stream = [i for it in range(iterations) for i in order(it, batch_size=batch_size, num_prompts=num_prompts)]
    passes = [tuple(stream[k : k + num_prompts]) for k in range(0, len(stream), num_prompts)]
    assert len(stream) == iterations * batch_size
    assert all(sorted(p) == list(range(num_prompts)) for p in passes)
    if num_prompts > 4:
        assert len(set(passes)) > len(passes) / 2


def test_a_batch_larger_than_the_dataset_takes_several_passes():
    # kills: an IndexError, or the same prompt far more often than others
    counts = Counter(order(0, batch_size=8, num_prompts=3))
    assert sum(counts.values()) == 8
    assert sorted(counts.values()) == [2, 3, 3]


def test_order_is_a_pure_function():
    # kills: global random state read or advanced, a generator kept between calls
    late = order(100)
    state = random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state()
    np.random.seed(3)
    assert order(100) == late
    np.random.set_state(("MT19937", state[1], 624))
    order(5)
    assert random.getstate() == state[0]
    assert torch.equal(torch.get_rng_state(), state[2])
    assert all(type(i) is int for i in late)


def test_order_depends_on_the_seed():
    # kills: seed ignored
    assert len({tuple(order(0, seed=seed, num_prompts=50, batch_size=50)) for seed in range(5)}) == 5


def test_order_looks_random():
    # kills: the dataset read in its own order
    assert order(0, batch_size=50, num_prompts=50) != list(range(50))


# Padding


def test_padding_of_ragged_and_empty_rows():
    # kills: ids[-0:] filling the row of an empty prompt, left for right
    ids, mask = pad_left([[1, 2, 3], [], [4]], 9)
    assert ids.tolist() == [[1, 2, 3], [9, 9, 9], [9, 9, 4]]
    assert mask.tolist() == [[True] * 3, [False] * 3, [False, False, True]]
    ids, mask = pad_right([[1, 2, 3], [], [4, 5]], 9)
    assert ids.tolist() == [[1, 2, 3], [9, 9, 9], [4, 5, 9]]
    assert mask.tolist() == [[True] * 3, [False] * 3, [True, True, False]]
    assert (ids.dtype, mask.dtype) == (torch.int64, torch.bool)


@pytest.mark.parametrize("pad", [pad_left, pad_right])
def test_mask_comes_from_lengths_when_pad_is_a_real_id(pad):
    # kills: mask = ids != pad_id
    ids, mask = pad([[7, 7], [7, 1, 7]], 7)
    assert mask.sum(-1).tolist() == [2, 3]
    assert ids[1].tolist() == [7, 1, 7]


def test_padding_to_a_given_width():
    # kills: length ignored
    ids, mask = pad_left([[1, 2], [3]], 0, length=4)
    assert ids.tolist() == [[0, 0, 1, 2], [0, 0, 0, 3]]
    assert mask.sum(-1).tolist() == [2, 1]


def test_padding_leaves_its_rows_alone():
    # kills: reversing or extending the caller's lists in place
    rows = [[1, 2, 3], [4]]
    before = copy.deepcopy(rows)
    pad_left(rows, 0)
    pad_right(rows, 0)
    assert rows == before


# Found by breaking it


def test_tools_of_a_row_reach_the_template():
    # kills: tools given inside the example, where TRL's apply_chat_template does not look
    tokenizer = make_tokenizer()
    tokenizer.chat_template = "{% for t in tools or [] %}[{{ t.function.name }}]{% endfor %}" + TEMPLATE
    tool = {"type": "function", "function": {"name": "search", "description": "d", "parameters": {}}}
    batch = everything([{"prompt": USER, "tools": [tool]}], tokenizer)
    assert tokenizer.decode(batch.prompt_ids[0]).startswith("[search]<user>")


def test_rows_may_leave_out_template_arguments(chat_tokenizer):
    # kills: **None, where a datasets.Dataset fills the column of a row that has none
    rows = [{"prompt": USER, "chat_template_kwargs": {"a": 1}}, {"prompt": USER, "chat_template_kwargs": None}]
    assert len(load(rows, chat_tokenizer)) == 2


def test_a_chat_that_cannot_be_answered_is_named(chat_tokenizer):
    # kills: TRL's "Invalid role in the last message: system" without a row
    with pytest.raises((TypeError, ValueError), match="row 1"):
        load([{"prompt": USER}, {"prompt": SYSTEM[:1]}], chat_tokenizer)


def test_a_row_without_prompt_is_named(tokenizer):
    # kills: a bare KeyError: 'prompt'
    with pytest.raises((TypeError, ValueError), match="row 1"):
        load([{"prompt": "a"}, {"answer": "b"}], tokenizer)


@pytest.mark.parametrize("second", [{"prompt": "b"}, {"prompt": "b", "answer": 1, "source": 2}])
def test_rows_with_other_columns_than_the_first_are_refused_when_built(second, tokenizer):
    # kills: a KeyError in the iteration that first draws the row; a column dropped in silence
    with pytest.raises((TypeError, ValueError), match="row 1"):
        load([{"prompt": "a", "answer": 1}, second], tokenizer)


@pytest.mark.parametrize("dataset", [["first prompt", "second prompt"], "one prompt", [1, 2]])
def test_a_list_of_texts_is_told_to_be_a_list_of_dicts(dataset, tokenizer):
    # kills: "the dataset has no 'prompt' column; it has [' ', 'f', ...]"; "argument of type 'int' is not iterable"
    with pytest.raises((TypeError, ValueError), match="dict"):
        load(dataset, tokenizer)


def test_a_chat_without_messages_is_named(chat_tokenizer):
    # kills: a bare IndexError from TRL
    with pytest.raises((TypeError, ValueError), match="row 1"):
        load([{"prompt": USER}, {"prompt": []}], chat_tokenizer)


def test_text_and_chats_in_one_dataset(chat_tokenizer, config_factory):
    # kills: the format of every completion in a batch taken from the batch's first prompt
    seen = []

    def reward(prompts, completions):
        seen.extend(zip(prompts, completions, strict=True))
        return [0.0] * len(completions)

    try:
        make_trainer(config_factory(), chat_tokenizer, [{"prompt": "text"}, {"prompt": USER}], reward).train()
    except (TypeError, ValueError) as error:
        assert "row" in str(error)  # noqa: PT017
    assert [pair for pair in seen if type(pair[0]) is not type(pair[1])] == []


def test_advice_for_raw_text_can_be_followed(tokenizer):
    # kills: "set truncate_prompts", which PPOConfig refuses together with text_prompt_length
    with pytest.raises(ValueError, match="context of 15") as info:
        load([{"text": LETTERS}], tokenizer, text_prompt_length=20, context_length=15)
    assert "text_prompt_length" in str(info.value)
    assert "truncate_prompts" not in str(info.value)


def test_advice_for_a_completion_that_fills_the_context_can_be_followed(tokenizer):
    # kills: "set truncate_prompts", which is then refused because no token of the prompt is left
    with pytest.raises(ValueError, match="context of 6") as info:
        load([{"prompt": LETTERS}], tokenizer, context_length=6)
    assert "truncate_prompts" not in str(info.value)


def test_prompt_column_beside_text_is_not_lost(tokenizer):
    # kills: with text_prompt_length a "prompt" column vanishes: neither used, nor passed on, nor refused
    try:
        batch = everything([{"text": LETTERS, "prompt": "question"}], tokenizer, text_prompt_length=3)
    except ValueError as error:
        assert "prompt" in str(error)  # noqa: PT017
    else:
        assert batch.columns.get("prompt") == ["question"]


def test_data_frame_is_refused_with_advice(tokenizer):
    # kills: a bare KeyError: 0
    pandas = pytest.importorskip("pandas")
    with pytest.raises(TypeError, match="DataFrame"):
        load(pandas.DataFrame({"prompt": ["a"]}), tokenizer)


def test_tokens_outside_the_vocabulary_of_the_model_are_refused_when_built(tokenizer, config_factory):
    # kills: "IndexError: index out of range in self" from the embedding, in the first iteration
    model = make_model("llama", vocab_size=60)
    with pytest.raises(ValueError, match="60"):
        make_trainer(config_factory(), tokenizer, [{"prompt": LETTERS}], model=model)


def test_stop_token_id_outside_the_vocabulary_is_refused_when_built(tokenizer, config_factory):
    # kills: an end token that can never be sampled, accepted without a word
    with pytest.raises(ValueError, match="stop_token_ids"):
        make_trainer(config_factory(stop_token_ids=[300]), tokenizer, [{"prompt": "a"}])
