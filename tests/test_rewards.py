"""Reward functions: every way to write one, every way to get it wrong, and what the user is told."""

import asyncio
import copy
import functools
import gc
import json
import re
import warnings
from pathlib import Path

import numpy as np
import pytest
import torch
import trl.rewards
from conftest import TEXTS, make_lora, make_model, make_tokenizer
from torch import nn
from torch.testing import assert_close
from trl.rewards import get_soft_overlong_punishment, think_format_reward

from rlhf_kit import PPOTrainer
from rlhf_kit.rewards import RewardFunctions

PROMPTS = ["prompt zero", "prompt one", "prompt two"]
COMPLETIONS = ["aa", "b", "cccc"]
PROMPT_IDS = [[7, 8], [9], [7]]
IDS = [[1, 2], [3], [4, 5, 6, 0]]
LENGTHS = [2.0, 1.0, 4.0]


def run(funcs, **settings):
    rewards = judge(funcs, **settings)
    return rewards.scores, rewards.by_function


def judge(funcs, *, columns=None, weights=None, trainer_state=None, checked=True, completions=COMPLETIONS, ids=IDS):
    columns = columns or {}
    rewards = RewardFunctions(funcs, weights=weights, column_names=list(columns) if checked else None)
    return rewards(
        prompts=PROMPTS,
        completions=completions,
        prompt_ids=copy.deepcopy(PROMPT_IDS),
        completion_ids=copy.deepcopy(ids),
        columns=columns,
        trainer_state=trainer_state,
    )


def length(completions, **kwargs):
    return [float(len(text)) for text in completions]


async def async_length(completions, **kwargs):
    await asyncio.sleep(0)
    return [float(len(text)) for text in completions]


# What a function is given


def test_trl_signature():
    # kills: an argument renamed or missing, columns not unpacked
    seen = {}

    def reward(prompts, completions, completion_ids, **kwargs):
        seen.update(prompts=prompts, completions=completions, completion_ids=completion_ids, **kwargs)
        return LENGTHS

    run(reward, columns={"answer": [1, 2, 3]}, trainer_state="state")
    assert callable(seen.pop("log_extra"))
    assert callable(seen.pop("log_metric"))
    assert seen == {
        "prompts": PROMPTS,
        "completions": COMPLETIONS,
        "prompt_ids": PROMPT_IDS,
        "completion_ids": IDS,
        "answer": [1, 2, 3],
        "trainer_state": "state",
    }


def test_function_without_kwargs_gets_only_what_it_names():
    # kills: everything passed to everyone
    columns = {"answer": [3.0, 2.0, 1.0], "source": ["x"] * 3}
    scores, _ = run(lambda answer: answer, columns=columns)
    assert scores.tolist() == [3, 2, 1]
    scores, _ = run(lambda completions, answer=None: [len(c) + a for c, a in zip(completions, answer, strict=True)],
                    columns=columns)  # fmt: skip
    assert scores.tolist() == [5, 3, 5]
    scores, _ = run(lambda: [1, 2, 3], columns=columns)
    assert scores.tolist() == [1, 2, 3]


def test_optional_argument_without_column_keeps_its_default():
    # kills: absent columns passed as None, defaults taken for required
    scores, _ = run(lambda completions, bonus=5.0: [bonus] * 3)
    assert scores.tolist() == [5, 5, 5]


def test_keyword_only_arguments():
    # kills: keyword-only parameters overlooked
    def reward(*, completions, answer):
        return answer

    assert run(reward, columns={"answer": LENGTHS})[0].tolist() == LENGTHS
    with pytest.raises(ValueError, match=r"needs \['answer'\]"):
        run(reward)


class Length:
    """A reward with state."""

    def __init__(self, factor=1.0):
        self.factor = factor

    def __call__(self, completions, **kwargs):
        return [self.factor * len(text) for text in completions]

    def method(self, completions):
        return self(completions)

    async def later(self, completions):
        return self(completions)


class AsyncLength(Length):
    async def __call__(self, completions):
        return [float(len(text)) for text in completions]


@pytest.mark.parametrize(
    "func",
    [
        length,
        lambda completions, **kwargs: [len(text) for text in completions],
        functools.partial(lambda completions, factor: [factor * len(t) for t in completions], factor=1.0),
        functools.partial(functools.partial(length)),
        Length(),
        Length().method,
        async_length,
        Length().later,
        AsyncLength(),
        functools.partial(async_length),
    ],
)
@pytest.mark.parametrize("checked", [True, False])
def test_anything_that_can_be_called(func, checked):
    # kills: inspect.isfunction instead of callable, coroutines not awaited, self counted as an argument
    scores, by_name = run(func, checked=checked)
    assert scores.tolist() == LENGTHS
    assert len(by_name) == 1


CHAT_TEMPLATE = "{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}"
TRL_REWARDS = {
    "accuracy_reward": trl.rewards.accuracy_reward,
    "reasoning_accuracy_reward": trl.rewards.reasoning_accuracy_reward,
    "think_format_reward": think_format_reward,
    "get_cosine_scaled_reward": trl.rewards.get_cosine_scaled_reward(max_len=100),
    "get_repetition_penalty_reward": trl.rewards.get_repetition_penalty_reward(ngram_size=2),
    "get_soft_overlong_punishment": get_soft_overlong_punishment(max_completion_len=5, soft_punish_cache=3),
}


def test_every_reward_of_trl_is_in_the_table():
    # kills: a reward function that a new TRL brings and that nobody tried
    assert set(TRL_REWARDS) == {name for names in trl.rewards._import_structure.values() for name in names}


def test_trl_rewards_give_what_they_give_under_grpo():
    # kills: completions, columns or log functions in another form than GRPOTrainer passes them
    texts = ["<think>\nhm\n</think>\nThe answer is $\\boxed{4}$.", "It is $5$. It is $5$.", "$4$"]
    completions = [[{"role": "assistant", "content": text}] for text in texts]
    ids = [[1, 2], [3], [4, 5, 4, 5]]
    given = {"prompts": PROMPTS, "completions": completions, "completion_ids": ids, "solution": ["$4$"] * 3}
    for name, func in TRL_REWARDS.items():
        expected = func(**copy.deepcopy(given), log_extra=lambda *_: None, log_metric=lambda *_: None)
        _, by_name = run(func, completions=completions, ids=ids, columns={"solution": given["solution"]})
        (found,) = by_name.values()
        assert found.tolist() == pytest.approx([float(x) for x in expected]), name
        assert len(set(expected)) > 1, name
    judged = judge(TRL_REWARDS["accuracy_reward"], completions=completions, columns={"solution": given["solution"]})
    assert {"solution", "answer_parsed"} & set(judged.columns)


def test_trl_rewards_train(config_factory):
    # kills: a reward of TRL's that works by hand and not in a run, logged columns that break the log
    tokenizer = make_tokenizer()
    tokenizer.chat_template = CHAT_TEMPLATE
    rows = [{"prompt": [{"role": "user", "content": text[:8]}], "solution": "$4$"} for text in TEXTS]
    trainer = PPOTrainer(
        make_model("gpt2"), list(TRL_REWARDS.values()), config_factory(num_iterations=1), rows,
        processing_class=tokenizer, peft_config=make_lora(),
    )  # fmt: skip
    metrics = trainer.train()
    assert {f"reward/{name}" for name in trainer.reward_funcs.names} <= set(metrics)
    completions = Path(trainer.args.output_dir, "completions.jsonl").read_text().splitlines()
    assert any(key.startswith("logged/") for key in json.loads(completions[0]))


def test_trl_rewards_unchanged():
    # kills: another signature than TRL's
    good = [{"role": "assistant", "content": "<think>\nhm\n</think>\nyes"}]
    bad = [{"role": "assistant", "content": "yes"}]
    assert run(think_format_reward, completions=[good, bad, good])[0].tolist() == [1, 0, 1]
    punish = get_soft_overlong_punishment(max_completion_len=4, soft_punish_cache=2)
    assert run([think_format_reward, punish], completions=[bad] * 3)[0].tolist() == [0, 0, -1]


# What it may return


@pytest.mark.parametrize(
    "output",
    [
        [1, 0, 2], (1, 0, 2), [1.0, 0.0, 2.0], np.array([1, 0, 2]), np.array([1, 0, 2], dtype=np.float16),
        torch.tensor([1.0, 0.0, 2.0]), torch.tensor([1, 0, 2]), torch.tensor([1, 0, 2], dtype=torch.bfloat16),
        torch.tensor([1.0, 0.0, 2.0], requires_grad=True), [np.float32(1), np.int64(0), np.float64(2)],
        [torch.tensor(1), torch.tensor([0.0]), torch.tensor(2.0, requires_grad=True)], [True, False, 2],
        [np.bool_(True), np.bool_(False), 2],
    ],
)  # fmt: skip
def test_every_kind_of_number(output):
    # kills: isinstance(r, float), .numpy() on tensors with gradient or in bfloat16
    scores, by_name = run(lambda **kwargs: output)
    assert scores.dtype == torch.float32
    assert not scores.requires_grad
    assert scores.tolist() == [1, 0, 2]
    assert by_name["lambda"].tolist() == [1, 0, 2]


def test_weights_multiply_and_add():
    # kills: weights ignored or normalised, mean for sum
    funcs = [lambda completions: [1, 2, 3], lambda completions: [10, 20, 30]]
    scores, by_name = run(funcs, weights=[2, -0.5])
    assert scores.tolist() == [-3, -6, -9]
    assert [r.tolist() for r in by_name.values()] == [[1, 2, 3], [10, 20, 30]]  # raw, unweighted
    assert run(funcs)[0].tolist() == [11, 22, 33]
    assert run(funcs[:1], weights=[0.0])[0].tolist() == [0, 0, 0]


def test_none_leaves_a_completion_to_the_other_functions():
    # kills: None as NaN in the sum, None as 0 in the metric
    funcs = [lambda completions: [None, 2, None], lambda completions: [10, None, 30]]
    scores, by_name = run(funcs, weights=[1, 2])
    assert scores.tolist() == [20, 2, 60]
    assert_close(by_name["lambda_0"], torch.tensor([torch.nan, 2, torch.nan]), equal_nan=True)
    scores, by_name = run([lambda completions: [None] * 3, length])
    assert scores.tolist() == LENGTHS
    assert bool(by_name["lambda"].isnan().all())


# What it must not return


def test_none_from_everyone_is_an_error_that_names_the_sample():
    # kills: any() for all(), the first completion named instead of the one concerned
    funcs = [lambda completions: [1, None, None], lambda completions: [None, None, 1]]
    with pytest.raises(ValueError, match=r"completion 1: .*lambda_0.*lambda_1.*None.*'prompt one'.*'b'.*0\.0"):
        run(funcs)
    with pytest.raises(ValueError, match="completion 0"):
        run(lambda completions: [None] * 3)


@pytest.mark.parametrize("output", [[1, 2], [1, 2, 3, 4], [], np.ones(2), torch.ones(1)])
def test_wrong_number_of_rewards(output):
    # kills: broadcasting, zip without strict
    with pytest.raises(ValueError, match=f"'lambda' returned {len(output)} rewards for 3 completions"):
        run(lambda completions: output)


@pytest.mark.parametrize(
    ("output", "kind"),
    [
        (1.0, "float"), (3, "int"), (True, "bool"), ("abc", "str"), ({"a": 1, "b": 2, "c": 3}, "dict"),
        ((x for x in LENGTHS), "generator"), (None, "NoneType"), ({1.0, 2.0, 4.0}, "set"),
        (map(float, LENGTHS), "map"), (torch.tensor(1.0), "float"), (np.float32(1.0), "float"),
    ],
)  # fmt: skip
def test_something_else_than_a_list(output, kind):
    # kills: a scalar for all, the letters of a text, the keys of a dict
    with pytest.raises(TypeError, match=f"'lambda' must return a list with one number per completion, got {kind}"):
        run(lambda completions: output)


@pytest.mark.parametrize(
    "bad", [float("nan"), float("inf"), -float("inf"), np.float32("nan"), torch.tensor(torch.inf)]
)
def test_nan_and_infinity_are_refused_with_the_sample(bad):
    # kills: NaN taken for None
    with pytest.raises(ValueError, match=r"'lambda' returned -?(nan|inf) for completion 2.*'prompt two'.*'cccc'"):
        run(lambda completions: [1.0, 2.0, bad])


@pytest.mark.parametrize("bad", ["1.0", b"1", {"score": 1.0}, object(), 1 + 2j, ["1.0"], [[1.0]]])
def test_items_that_are_no_numbers_are_refused_with_the_sample(bad):
    # kills: float("1.0"), nested lists flattened
    with pytest.raises(TypeError, match=r"'lambda' returned .* for completion 1.*'prompt one'.*'b'"):
        run(lambda completions: [1.0, bad, 2.0])


@pytest.mark.parametrize("output", [np.ones((3, 1)), torch.ones(3, 1), [[1.0], [2.0], [3.0]]])
def test_columns_of_numbers_are_refused(output):
    # kills: squeeze, a silent (3, 3) by broadcasting
    with pytest.raises(ValueError, match="'lambda' returned 1 numbers for the 2 tokens of completion 0"):
        run(lambda completions: output)


def test_long_samples_are_shortened():
    # kills: a megabyte of completion in the error
    with pytest.raises(ValueError, match=r"\.\.\. \(100002 characters\)") as info:
        run(lambda completions: [1.0, float("nan"), 1.0], completions=["a", "x" * 100_000, "c"])
    assert len(str(info.value)) < 1000


# Exceptions


class OwnError(Exception):
    """Nothing that anyone else raises."""


def failing(completions):
    raise OwnError("my message")


async def async_failing(completions):
    await asyncio.sleep(0)
    raise OwnError("my message")


@pytest.mark.parametrize("func", [failing, async_failing])
def test_exceptions_keep_their_type_and_say_which_function(func):
    # kills: exceptions wrapped, swallowed or turned into a reward of 0
    with pytest.raises(OwnError) as info:
        run([length, func])
    assert info.value.args == ("my message",)
    assert any(repr(func.__name__) in note for note in info.value.__notes__)


def test_no_coroutine_is_left_behind_when_another_function_fails():
    # kills: "coroutine was never awaited" beside the real error

    def fail():
        try:
            run([async_length, failing])
        except OwnError:
            return True

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        assert fail()
        gc.collect()
    assert [str(warning.message) for warning in caught if "never awaited" in str(warning.message)] == []


# Async


def test_async_functions_run_concurrently():
    # kills: awaited one after the other, in which case the first waits for ever
    met = []

    async def first(completions):
        met.append(asyncio.Event())
        await asyncio.wait_for(met[0].wait(), timeout=5)
        return [1, 1, 1]

    async def second(completions):
        met[0].set()
        return [2, 2, 2]

    assert run([first, second])[0].tolist() == [3, 3, 3]


def test_sync_and_async_keep_their_places():
    # kills: results in the order of completion, async results put after the others
    async def slow(completions):
        await asyncio.sleep(0.02)
        return [1, 1, 1]

    async def quick(completions):
        return [10, 10, 10]

    scores, by_name = run([slow, length, quick], weights=[1, 0, 3])
    assert scores.tolist() == [31, 31, 31]
    assert {name: r[0].item() for name, r in by_name.items()} == {"slow": 1, "length": 2, "quick": 10}


def test_works_inside_a_running_event_loop():
    # kills: asyncio.run in the caller's thread, as in a notebook
    async def notebook():
        return run([async_length, length])

    assert asyncio.run(notebook())[0].tolist() == [4, 2, 8]


def test_async_results_are_checked_too():
    # kills: checks before awaiting
    async def nan(completions):
        return [float("nan"), 1, 1]

    async def short(completions):
        return [1]

    with pytest.raises(ValueError, match="'nan' returned nan for completion 0"):
        run(nan)
    with pytest.raises(ValueError, match="'short' returned 1 rewards for 3"):
        run(short)


# Construction


@pytest.mark.parametrize(
    ("funcs", "match"),
    [
        (nn.Linear(1, 1), r"reward_funcs\[0\].*got Linear"),
        ("org/reward-model", r"reward_funcs\[0\].*got str"),
        ([length, "org/reward-model"], r"reward_funcs\[1\].*got str"),
        ([length, None], r"reward_funcs\[1\].*got NoneType"),
        (3.0, r"reward_funcs\[0\].*got float"),
    ],
)
def test_what_is_no_function_is_refused(funcs, match):
    # kills: a module called as a function because it is callable
    with pytest.raises(TypeError, match=match):
        RewardFunctions(funcs)


@pytest.mark.parametrize("empty", [[], ()])
def test_no_function_is_refused(empty):
    # kills: an empty sum, a reward of 0 for everything
    with pytest.raises(ValueError, match="empty list"):
        RewardFunctions(empty)


@pytest.mark.parametrize("weights", [[], [1.0], [1.0, 2.0, 3.0]])
def test_wrong_number_of_weights_is_refused_with_both_numbers(weights):
    # kills: zip without strict
    with pytest.raises(ValueError, match=f"reward_weights has {len(weights)} entries for 2 reward functions"):
        RewardFunctions([length, failing], weights=weights)


@pytest.mark.parametrize(
    "func",
    [
        lambda completions, answer: LENGTHS,
        lambda completions, answer, **kwargs: LENGTHS,
        functools.partial(lambda completions, answer, k: LENGTHS, k=1),
    ],
)
def test_missing_column_is_refused_before_anything_runs(func):
    # kills: the check of column names, required arguments of functions with **kwargs overlooked
    with pytest.raises(ValueError, match=r"'lambda' needs \['answer'\], but .* columns are \['question', 'source'\]"):
        RewardFunctions(func, column_names=["source", "question"])


@pytest.mark.parametrize("column", ["prompts", "completions", "completion_ids", "trainer_state"])
def test_column_named_like_an_argument_is_refused(column):
    # kills: the column silently hidden by the argument
    with pytest.raises(ValueError, match=rf"\['{column}'\].*rename"):
        RewardFunctions(length, column_names=["answer", column])


def test_names_are_unique_and_say_what_they_can():
    # kills: the second of two equal names overwriting the metric of the first
    assert RewardFunctions([length, lambda completions: 0, length, Length()]).names == [
        "length_0", "lambda", "length_1", "Length",
    ]  # fmt: skip
    assert RewardFunctions(functools.partial(functools.partial(length))).names == ["length"]


# In a trainer


def make_trainer(args, tokenizer, reward, rows=None, **kwargs):
    rows = rows or [{"prompt": text[:9], "number": i} for i, text in enumerate(TEXTS)]
    return PPOTrainer(
        make_model("llama"), reward, args, rows, processing_class=tokenizer, peft_config=make_lora("llama"), **kwargs
    )


def test_rewards_in_training_see_aligned_columns_text_and_state(tokenizer, config_factory):
    # kills: columns of the dataset's first rows instead of the drawn ones, padding or prompt in the text
    iterations = []

    def reward(prompts, completions, completion_ids, number, trainer_state):
        iterations.append(trainer_state.iteration)
        for prompt, completion, ids, i in zip(prompts, completions, completion_ids, number, strict=True):
            assert prompt == TEXTS[i][:9]
            assert completion == tokenizer.decode(ids, skip_special_tokens=True)
            assert 1 <= len(ids) <= 6
        return [float(i) for i in number]

    args = config_factory(num_completions_per_prompt=2, reward_weights=[0.5])
    trainer = make_trainer(args, tokenizer, reward)
    metrics = trainer.train()
    assert iterations == [0, 1]
    assert metrics["score"] == pytest.approx(metrics["reward/reward"] / 2)


@pytest.mark.parametrize("func", [failing, async_failing])
def test_exception_in_training_comes_before_any_weight_changes(func, tokenizer, config_factory):
    # kills: rewards computed after the update has begun
    trainer = make_trainer(config_factory(), tokenizer, func)
    before = {n: p.detach().clone() for n, p in trainer.model.named_parameters()}
    with pytest.raises(OwnError) as info:
        trainer.train()
    assert func.__name__ in "".join(info.value.__notes__)
    assert all(torch.equal(p, before[n]) for n, p in trainer.model.named_parameters())


def test_missing_column_is_refused_when_the_trainer_is_built(tokenizer, config_factory):
    # kills: column_names not handed to RewardFunctions
    with pytest.raises(ValueError, match=r"needs \['answer'\]"):
        make_trainer(config_factory(), tokenizer, lambda completions, answer: LENGTHS)
    with pytest.raises(ValueError, match=r"needs \['number'\]"):  # a column that only the training set has
        make_trainer(
            config_factory(), tokenizer, lambda completions, number: LENGTHS, eval_dataset=[{"prompt": "without"}]
        )


# Found by breaking it


@pytest.mark.parametrize("value", [10**400, 1e39, -1e300], ids=["huge int", "1e39", "-1e300"])
def test_numbers_beyond_float32_are_refused_with_the_sample(value):
    # kills: a bare OverflowError; infinity in float32, logged as score inf and skipped updates
    with pytest.raises(ValueError, match=r"'lambda' .* completion 1"):
        run(lambda completions: [1.0, value, 2.0])


@pytest.mark.parametrize("output", [b"abc", bytearray(b"abc")])
def test_bytes_are_no_list_of_numbers(output):
    # kills: 97.0, 98.0, 99.0
    with pytest.raises(TypeError, match="'lambda'"):
        run(lambda completions: output)


def test_names_made_unique_stay_unique():
    # kills: f, f, f_0 -> f_0, f_1, f_0, then "The size of tensor a (2) must match the size of tensor b (3)"
    def f(completions):
        return LENGTHS

    def f_0(completions):
        return LENGTHS

    rewards = RewardFunctions([f, f, f_0])
    assert len(set(rewards.names)) == 3


def test_an_object_with_an_attribute_func_is_no_partial():
    # kills: an endless loop on anything whose .func has a .func again, such as unittest.mock.Mock()
    class Wrapper:
        looked = 0

        @property
        def func(self):
            Wrapper.looked += 1
            assert Wrapper.looked < 100, "endless"
            return self

        def __call__(self, completions):
            return LENGTHS

    assert RewardFunctions(Wrapper()).names == ["Wrapper"]


@pytest.mark.parametrize(
    "func",
    [
        lambda prompts, completions, /: LENGTHS,
        lambda *args: LENGTHS,
        lambda prompts, completions, /, **kwargs: LENGTHS,
    ],
    ids=["positional-only", "star-args", "positional-only with kwargs"],
)
def test_functions_that_cannot_be_called_by_keyword(func):
    # kills: a TypeError in the first iteration; *args called with nothing at all
    with pytest.raises((TypeError, ValueError), match="lambda"):
        RewardFunctions(func, column_names=[])


@pytest.mark.parametrize("weight", [float("nan"), float("inf")])
def test_weights_must_be_finite(weight):
    # kills: NaN scores from finite rewards
    with pytest.raises(ValueError, match="reward_weights"):
        RewardFunctions(length, weights=[weight])


def test_one_function_cannot_change_what_the_next_one_sees():
    # kills: the same lists handed to every function
    def greedy(completions, completion_ids, **kwargs):
        completions[0] = ""
        completion_ids[0].clear()
        return LENGTHS

    seen = []
    run([greedy, lambda completions, completion_ids: seen.extend([completions[0], completion_ids[0]]) or LENGTHS],
        completions=list(COMPLETIONS))  # fmt: skip
    assert seen == ["aa", [1, 2]]


def test_a_reward_function_cannot_change_what_is_learned(tokenizer, config_factory):
    # kills: the sampled ids themselves handed out: popping the end token in place changes the rollout
    def greedy(completion_ids):
        for ids in completion_ids:
            del ids[1:]
        return [0.0] * len(completion_ids)

    metrics = make_trainer(config_factory(num_iterations=1), tokenizer, greedy).train()
    assert metrics["completion_length"] > 1


@pytest.mark.parametrize("column", ["completions", "prompts"])
def test_a_hidden_column_is_refused_although_the_eval_dataset_lacks_it(column, tokenizer, config_factory):
    # kills: only columns of both datasets compared with the arguments
    rows = [{"prompt": "a", column: "mine"}]
    with pytest.raises(ValueError, match="rename"):
        make_trainer(config_factory(), tokenizer, length, rows, eval_dataset=[{"prompt": "b"}])


def test_evaluate_names_a_column_that_its_dataset_lacks(tokenizer, config_factory):
    # kills: "missing 1 required positional argument" after sampling
    trainer = make_trainer(config_factory(), tokenizer, lambda completions, number: [0.0] * len(completions))
    with pytest.raises(ValueError, match=re.escape("needs ['number']")):
        trainer.evaluate([{"prompt": "a"}])


def test_scores_are_float32_whatever_the_default_dtype():
    # kills: torch.tensor(list of floats) without a dtype
    torch.set_default_dtype(torch.float64)
    try:
        scores, by_name = run(length)
    finally:
        torch.set_default_dtype(torch.float32)
    assert scores.dtype == torch.float32
    assert by_name["length"].dtype == torch.float32


def test_what_a_function_does_to_a_column_reaches_nobody_else():
    # kills: columns copied one level deep: a function that pops from its row's list empties the dataset epoch by epoch
    columns = {"tests": [["a", "b"], ["c"], ["d"]]}

    def greedy(tests):
        return [float(len([rows.pop() for _ in range(len(rows))])) for rows in tests]

    assert run([greedy, greedy], columns=columns)[0].tolist() == [4, 2, 2]
    assert columns == {"tests": [["a", "b"], ["c"], ["d"]]}


def test_async_resources_live_from_one_rollout_to_the_next():
    # kills: a new event loop for every rollout: a semaphore or an HTTP client made once fails at the second one
    one_at_a_time = asyncio.Semaphore(1)

    async def score(text):
        async with one_at_a_time:
            await asyncio.sleep(0)
            return float(len(text))

    async def reward(completions):
        return await asyncio.gather(*map(score, completions))

    rewards = RewardFunctions(reward)
    for _ in range(2):
        judged = rewards(
            prompts=PROMPTS, completions=COMPLETIONS, prompt_ids=PROMPT_IDS, completion_ids=IDS, columns={}
        )
        assert judged.scores.tolist() == LENGTHS


def test_weighted_sums_beyond_float32_are_refused():
    # kills: finite rewards and finite weights with an infinite score: every update skipped
    with pytest.raises(ValueError, match="completion 0"):
        run(lambda completions: [3e38, 1.0, 1.0], weights=[10.0])


# Numbers per token


def test_numbers_per_token_are_weighted_padded_and_summed():
    # kills: the weight left out of one of the two, totals as means, the columns of another row, unweighted metrics
    per_token = [[1.0, -2.0], [0.5], [0.0, 1.0, 0.0, 4.0]]
    judged = judge([lambda completions: per_token, length], weights=[2.0, 10.0])
    assert_close(judged.token_rewards, torch.tensor([[2.0, -4, 0, 0], [1.0, 0, 0, 0], [0.0, 2, 0, 8]]))
    assert_close(judged.scores, torch.tensor([-2.0 + 20, 1.0 + 10, 10.0 + 40]))
    assert judged.by_function["lambda"].tolist() == [-1.0, 0.5, 5.0]


def test_numbers_per_token_of_several_functions_add_up():
    # kills: those of the first function only
    one, two = [[1.0, -2.0], [0.5], [0.0, 1.0, 0.0, 4.0]], [[3.0, 0.0], [7.0], [1.0, 1.0, 1.0, 1.0]]
    judged = judge([lambda completions: one, lambda completions: two], weights=[2.0, -1.0])
    assert judged.token_rewards.tolist() == [[-1.0, -4.0, 0, 0], [-6.0, 0, 0, 0], [-1.0, 1.0, -1.0, 7.0]]
    assert judged.scores.tolist() == [-5.0, -6.0, 6.0]


def test_a_function_may_mix_numbers_per_token_with_others_and_none():
    # kills: one kind decided from the first entry, None as zeros in the metric
    judged = judge([lambda completions: [3.0, None, [1, 1, 1, 1]], length])
    assert_close(judged.token_rewards, torch.tensor([[0.0] * 4, [0.0] * 4, [1.0] * 4]))
    assert judged.scores.tolist() == [5.0, 1.0, 8.0]
    assert judged.by_function["lambda"].isnan().tolist() == [False, True, False]


@pytest.mark.parametrize("kind", [list, tuple, np.array, torch.tensor])
def test_numbers_per_token_of_any_kind(kind):
    # kills: lists only
    judged = judge(lambda completions: [kind([1.0, 2.0]), kind([3.0]), kind([0.0, 0.0, 0.0, 4.0])])
    assert judged.scores.tolist() == [3.0, 3.0, 4.0]


def test_without_numbers_per_token_there_are_none():
    # kills: a table of zeros, which would cost every run an addition
    assert judge(length).token_rewards is None


@pytest.mark.parametrize(
    ("bad", "match"),
    [
        ([1.0, 2.0], r"'lambda' returned 2 numbers for the 1 tokens of completion 1.*completion_ids\[1\].*'b'"),
        ([], "'lambda' returned 0 numbers for the 1 tokens"),
        ([None], "'lambda' returned None for a token of completion 1"),
        ([float("nan")], "'lambda' returned nan for completion 1"),
        ([1e19], "'lambda' returned 1e\\+19 for completion 1"),
    ],
)
def test_wrong_numbers_per_token(bad, match):
    # kills: a row cut or padded in silence
    with pytest.raises(ValueError, match=match):
        run(lambda completions: [[1.0, 1.0], bad, 1.0])


# What functions log


def test_log_extra_and_log_metric():
    # kills: a metric summed or the last one taken, a column of the first function overwritten by the second
    def first(completions, log_extra, log_metric):
        log_extra("size", [len(c) for c in completions])
        log_metric("longest", 4)
        log_metric("longest", 2)
        return LENGTHS

    def second(completions, log_extra=None, **kwargs):
        log_extra("size", ["s", "m", "l"])
        return LENGTHS

    judged = judge([first, second])
    assert judged.columns == {"size": [2, 1, 4], "second/size": ["s", "m", "l"]}
    assert judged.metrics == {"longest": 3.0}


def test_log_extra_with_another_number_of_values():
    # kills: values that slip to other completions
    def reward(completions, log_extra):
        log_extra("size", [1])
        return LENGTHS

    with pytest.raises(ValueError, match=r"log_extra\('size', ...\) got 1 values for 3 completions"):
        run(reward)


def test_what_was_logged_belongs_to_one_call():
    # kills: notes kept from rollout to rollout
    calls = iter([True, False])

    def reward(completions, log_metric):
        if next(calls):
            log_metric("m", 1.0)
        return LENGTHS

    rewards = RewardFunctions(reward)
    given = {"prompts": PROMPTS, "completions": COMPLETIONS, "prompt_ids": PROMPT_IDS, "completion_ids": IDS}
    assert [rewards(**given, columns={}).metrics for _ in range(2)] == [{"m": 1.0}, {}]


def test_models_come_before_functions():
    # kills: a function that fails in one process before all have made the passes that a sharded base needs
    called = []

    class Model:
        __name__ = "model"

        def fingerprint(self):
            return "f"

        def nbytes(self):
            return 7

        def __call__(self, completions):
            called.append("model")
            return LENGTHS

    def function(completions):
        called.append("function")
        return [0.0] * 3

    rewards = RewardFunctions([function, Model(), function])
    judged = rewards(prompts=PROMPTS, completions=COMPLETIONS, prompt_ids=PROMPT_IDS, completion_ids=IDS, columns={})
    assert called == ["model", "function", "function"]
    assert judged.by_function["model"].tolist() == LENGTHS
    assert rewards.fingerprints() == {"model": "f"}
    assert rewards.model_bytes() == 7
