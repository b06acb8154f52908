"""Hostile datasets, rewards and batches: one clear error before anything changes, or a right run."""

import datetime
import math
from decimal import Decimal
from fractions import Fraction

import numpy as np
import pytest
import torch
from conftest import make_lora, make_model, make_tokenizer
from datasets import Dataset, IterableDataset
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from rlhf_kit import AutoModelForCausalLMWithValueHead, PPOConfig, PPOTrainer
from rlhf_kit.data import PromptDataset, pad_left, pad_right
from rlhf_kit.objective import ppo_loss
from rlhf_kit.rewards import RewardFunctions
from rlhf_kit.rollout import Rollout, concat_rollouts, record_policies
from rlhf_kit.targets import compute_targets

REPRODUCIBLE = {
    "derandomize": True, "database": None, "deadline": None, "suppress_health_check": list(HealthCheck),
}  # fmt: skip
TOKENIZER = make_tokenizer()
TOKENIZER.chat_template = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}"

# Datasets

texts = st.text(st.characters(), max_size=30) | st.sampled_from(
    ["", " ", "\x00", "\ud800", "\ufeff", "\u202e abc", "\U0001f600" * 5, "x" * 10_000, "<eos>", "<eos><eos>", "a\nb"]
)
things = st.one_of(
    st.none(), st.booleans(), st.integers(), st.floats(), texts, st.binary(max_size=3), st.just(math.nan),
    st.lists(st.integers(), max_size=3), st.just({"a": 1}), st.just(datetime.date(2020, 1, 1)),
)  # fmt: skip
roles = st.sampled_from(["user", "assistant", "", None, 3])
messages = st.fixed_dictionaries({}, optional={"role": roles, "content": texts | st.none(), "x": things})
prompts = st.one_of(texts, things, st.lists(messages, max_size=3))
rows = st.fixed_dictionaries(
    {}, optional={"prompt": prompts, "text": texts, "answer": things, "prompts": things, "completions": things}
)
good_rows = st.fixed_dictionaries({"prompt": st.sampled_from(["Hello", "A b c", "x"])}, optional={"answer": things})
datasets = st.one_of(
    st.lists(st.one_of(good_rows, good_rows, good_rows, rows, things), max_size=5),
    st.lists(st.fixed_dictionaries({"prompt": texts}), max_size=3),
    st.lists(st.fixed_dictionaries({"prompt": prompts, "answer": things}), max_size=3),
    st.lists(st.fixed_dictionaries({"prompt": st.lists(messages, min_size=1, max_size=2)}), max_size=3),
)


def load(rows):
    """The prompts, or the refusal."""
    try:
        return PromptDataset(rows, TOKENIZER, max_completion_length=6, context_length=128, vocab_size=300), None
    except (TypeError, ValueError) as error:
        return None, error


@settings(max_examples=800, **REPRODUCIBLE)
@given(datasets)
def test_datasets_are_read_or_refused_with_the_row(rows):
    # kills: an error from inside a library, a row that is skipped or cut in silence
    found, error = load(rows)
    if error is not None:
        assert type(error) in (TypeError, ValueError), repr(error)
        assert any(word in str(error) for word in ("row", "prompts", "dataset")), str(error)
        return
    assert len(found) == len(rows)
    for i, ids in enumerate(found.prompt_ids):
        assert 1 <= len(ids) <= 122
        assert all(0 <= token < 300 for token in ids)
        assert found.batch([i]).prompts == [rows[i]["prompt"]]


ROW = {"prompt": "a"}
CONTAINERS = {
    "text": "prompt", "number": 3, "dict of lists": {"prompt": ["a"]}, "generator": iter([ROW]), "set": {"a"},
    "array": np.array(["a"]), "stream": IterableDataset.from_generator(lambda: iter([ROW])), "empty": [],
    "empty dataset": Dataset.from_dict({"prompt": []}), "nulls": Dataset.from_dict({"prompt": ["a", None]}),
    "bytes": Dataset.from_dict({"prompt": [b"a"]}), "nested": Dataset.from_dict({"prompt": [{"role": "user"}]}),
    "dates": Dataset.from_dict({"prompt": [datetime.datetime(2020, 1, 1)]}),
}  # fmt: skip


def trainer_of(dataset, folder, reward=lambda completions: [0.0] * len(completions), **settings):
    return PPOTrainer(
        make_model("gpt2"),
        reward,
        PPOConfig(output_dir=str(folder), **settings),
        dataset,
        processing_class=TOKENIZER,
        peft_config=make_lora("gpt2"),
    )


@pytest.mark.parametrize("name", CONTAINERS)
def test_containers_that_are_no_datasets(name, tmp_path):
    # kills: a half-read generator, an AttributeError, a folder made before the dataset was looked at
    with pytest.raises((TypeError, ValueError), match=r"dataset|row"):
        trainer_of(CONTAINERS[name], tmp_path / "run")
    assert not (tmp_path / "run").exists()


# Rewards

numbers = st.one_of(
    st.floats(-1e6, 1e6), st.integers(-(10**6), 10**6), st.booleans(), st.just(None), st.just(-0.0),
    st.floats(-1e3, 1e3).map(np.float32), st.integers(0, 9).map(np.int64), st.floats(-9, 9).map(torch.tensor),
    st.just(Decimal("1.5")), st.just(Fraction(1, 3)),
)  # fmt: skip
junk = st.one_of(
    st.sampled_from([math.nan, math.inf, -math.inf, 1e40, 10**400, "1", "", b"1", 1j, [1.0], (), {}, object(), int,
                     np.array([1.0, 2.0]), torch.zeros(2), np.datetime64("2020")]),
    texts,
)  # fmt: skip
outputs = st.one_of(
    st.lists(numbers, min_size=3, max_size=3),
    st.lists(numbers, min_size=3, max_size=3).map(tuple),
    st.lists(st.one_of(numbers, numbers, junk), max_size=4),
    st.lists(st.floats(-9, 9), min_size=3, max_size=3).map(np.array),
    st.lists(st.floats(-9, 9), min_size=3, max_size=3).map(lambda x: torch.tensor(x, requires_grad=True)),
    st.sampled_from([None, 0, 1.0, "abc", {1.0, 2.0, 3.0}, {"a": 1}, np.zeros((3, 1)), torch.zeros(3, 3), range(3),
                     np.float64(3), torch.tensor(1.0)]),
)  # fmt: skip


def oracle(output):
    """Three float64 scores, None where there are none to be had."""
    try:
        listed = list(output.tolist() if hasattr(output, "tolist") else output)
        return [None if x is None else total(x) for x in listed]
    except (TypeError, ValueError, OverflowError, RuntimeError):
        return None


def total(reward):
    """A number, or the sum of one number per token."""
    if getattr(reward, "ndim", 0) or isinstance(reward, list | tuple):
        return sum(float(x) for x in (reward.tolist() if hasattr(reward, "tolist") else reward))
    return float(reward.item() if hasattr(reward, "item") else reward)


@settings(max_examples=800, **REPRODUCIBLE)
@given(outputs)
def test_rewards_are_taken_or_refused(output):
    # kills: a reward of another completion, NaN let through, a text taken for a number, an error that names nothing
    def judge(completions):
        return output

    rewards = RewardFunctions([judge, lambda completions: [None, 0.25, 0.5]], weights=[2.0, 1.0])
    given = {"prompts": ["p"] * 3, "completions": ["a", "b", "c"], "completion_ids": [[1], [1, 2], [1]], "columns": {},
             "prompt_ids": [[1]] * 3}  # fmt: skip
    refusal = None
    try:
        judged = rewards(**given)
    except (TypeError, ValueError) as error:
        refusal = error
    if refusal is not None:
        assert type(refusal) in (TypeError, ValueError)
        assert "judge" in str(refusal)
        return
    expected = oracle(output)
    assert expected is not None
    assert len(expected) == 3
    assert all(x is None or math.isfinite(x) for x in expected)
    for i, (value, other) in enumerate(zip(expected, [None, 0.25, 0.5], strict=True)):
        total = 2.0 * (value or 0.0) + (other or 0.0)
        assert float(judged.scores[i]) == pytest.approx(total, rel=1e-6, abs=1e-6)
        assert math.isnan(judged.by_function["judge"][i]) == (value is None)


ERRORS = [ValueError("v"), KeyError("k"), StopIteration(), RuntimeError("r"), AssertionError(), MemoryError(),
          OSError(2, "o"), KeyboardInterrupt(), SystemExit(3), GeneratorExit()]  # fmt: skip


@pytest.mark.parametrize("error", ERRORS, ids=lambda error: type(error).__name__)
def test_whatever_a_reward_raises_no_weight_changes_and_no_file_is_lost(error, tmp_path):
    # kills: an exception swallowed, weights moved or a checkpoint damaged by it
    def reward(completions, trainer_state):
        if trainer_state.iteration == 1:
            raise error
        return [float(len(text)) for text in completions]

    sizes = {"rollout_batch_size": 4, "mini_batch_size": 4, "max_completion_length": 4, "save_every": 1}
    trainer = trainer_of([{"prompt": "Hello"}], tmp_path, reward, **sizes)
    with pytest.raises(type(error)):
        trainer.train()
    after = {name: p.detach().clone() for name, p in trainer.model.trainable_parameters()}
    trainer.load_checkpoint()
    assert trainer.state.iteration == 1
    assert all(torch.equal(after[name], p) for name, p in trainer.model.trainable_parameters())


# Ragged batches

MODEL = None


def policy():
    global MODEL
    if MODEL is None:
        MODEL = AutoModelForCausalLMWithValueHead.from_pretrained(make_model("llama"), peft_config=make_lora("llama"))
        torch.manual_seed(0)
        with torch.no_grad():
            for name, p in MODEL.named_parameters():
                if "lora_B" in name or "v_head" in name:
                    p.normal_(std=0.3)
    return MODEL


def autocast():
    return torch.autocast("cpu", enabled=False)


def record(prompt_ids, completion_ids, args, pad):
    tokens = record_policies(policy(), prompt_ids, completion_ids, args, pad_token_id=pad, autocast=autocast)
    count = len(prompt_ids)
    return Rollout(
        prompts=["p"] * count, completions=["c"] * count, ended=torch.ones(count, dtype=torch.bool),
        scores=torch.tensor([float(sum(ids) % 7) for ids in completion_ids]), rewards_by_function={},
        logged_columns={}, logged_metrics={}, token_rewards=torch.zeros(tokens["completion_ids"].shape), **tokens,
    )  # fmt: skip


def losses(rollout, args):
    """Loss summed over tokens, and its gradient, with targets that do not look beyond a row."""
    targets = compute_targets(rollout, rollout.scores, rollout.token_rewards, args, kl_coef=0.1)
    policy().zero_grad()
    loss, _, _ = ppo_loss(policy(), rollout, targets, torch.arange(len(rollout)), args, kl_coef=0.1, autocast=autocast)
    loss.backward()
    return targets, float(loss.detach()), {n: p.grad.clone() for n, p in policy().trainable_parameters()}


ids = st.lists(st.integers(1, 299), min_size=1, max_size=9)
batches = st.lists(st.tuples(ids, ids), min_size=1, max_size=5)


@settings(max_examples=60, **REPRODUCIBLE)
@given(batches, st.integers(0, 299), st.integers(0, 299), st.randoms(use_true_random=False), st.integers(1, 5))
def test_a_batch_is_the_sum_of_its_rows(batch, pad, other_pad, shuffle, micro):
    # kills: padding that counts, a neighbour that matters, rows mixed up when joined
    args = PPOConfig(micro_batch_size=micro, whiten_advantages=False, entropy_coef=0.01, temperature=0.7)
    order = list(range(len(batch)))
    shuffle.shuffle(order)
    whole = record([batch[i][0] for i in order], [batch[i][1] for i in order], args, pad)
    single = [record([prompt], [completion], args, other_pad) for prompt, completion in batch]
    joined = concat_rollouts([single[i] for i in order])
    for name in ("old_logprobs", "old_values", "ref_logprobs", "kl", "ref_kl", "entropy", "completion_mask"):
        a, b = getattr(whole, name).float(), getattr(joined, name).float()
        torch.testing.assert_close(a, b, atol=2e-5, rtol=1e-4, msg=name)
        assert not a[~whole.completion_mask].any()
    targets, loss, gradient = losses(whole, args)
    parts = [losses(part, args) for part in single]
    assert loss == pytest.approx(sum(part[1] for part in parts), abs=1e-3, rel=1e-4)
    for name, value in gradient.items():
        torch.testing.assert_close(value, sum(part[2][name] for part in parts), atol=1e-3, rtol=1e-3)
    for row, i in enumerate(order):
        width = len(batch[i][1])
        for name in ("advantages", "returns", "rewards"):
            torch.testing.assert_close(
                getattr(targets, name)[row, :width], getattr(parts[i][0], name)[0], atol=1e-4, rtol=1e-4
            )


@settings(max_examples=200, **REPRODUCIBLE)
@given(st.lists(st.lists(st.integers(0, 299), max_size=9), min_size=1, max_size=6), st.integers(0, 299))
def test_padding_is_undone_by_its_mask(rows, pad):
    # kills: a mask that comes from comparing with the pad id, a shift by one
    for pad_rows in (pad_left, pad_right):
        padded, mask = pad_rows(rows, pad)
        assert padded.shape == mask.shape == (len(rows), max(map(len, rows)))
        assert [row[keep].tolist() for row, keep in zip(padded, mask, strict=True)] == rows
        assert (padded[~mask] == pad).all()
