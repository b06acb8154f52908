"""Statistics of a rollout: values by hand, padding that cannot get in, and plain Python floats."""

import json
import math
import re
from pathlib import Path

import pytest
import torch
from conftest import TEXTS, make_lora, make_model

from rlhf_kit import PPOTrainer
from rlhf_kit.metrics import completion_rows, rollout_metrics, target_metrics
from rlhf_kit.rollout import Rollout
from rlhf_kit.targets import Targets

NAN, INF = float("nan"), float("inf")
MASK = torch.tensor([[1, 1, 1, 1], [1, 1, 0, 0], [1, 0, 0, 0]]).bool()


def padded(rows, garbage):
    """(3, 4) with `garbage` where MASK is False."""
    table = torch.full(MASK.shape, garbage)
    for i, row in enumerate(rows):
        table[i, : len(row)] = torch.tensor(row)
    return table


def make_rollout(garbage=0.0, **overrides):
    fields = {
        "prompts": ["p0", "p1", "p2"],
        "completions": ["c0", "c1", "c2"],
        "prompt_ids": torch.ones(3, 2, dtype=torch.long),
        "prompt_mask": torch.ones(3, 2, dtype=torch.bool),
        "completion_ids": torch.ones(3, 4, dtype=torch.long),
        "completion_mask": MASK,
        "ended": torch.tensor([False, True, True]),
        "scores": torch.tensor([1.0, 3.0, -1.0]),
        "token_rewards": torch.zeros(3, 4),
        "logged_columns": {},
        "logged_metrics": {},
        "rewards_by_function": {"f": torch.tensor([2.0, NAN, 6.0]), "g": torch.tensor([1.0, 1.0, 1.0])},
        "old_logprobs": padded([[-1.0] * 4, [-1.0] * 2, [-1.0]], garbage),
        "old_values": padded([[1.0, 2.0, 3.0, 4.0], [0.0, 0.0], [4.0]], garbage),
        "ref_logprobs": padded([[-1.0] * 4, [-1.0] * 2, [-1.0]], garbage),
        "kl": padded([[0.1, -0.1, 0.2, 0.0], [0.7, 0.0], [-0.2]], garbage),
        "ref_kl": padded([[0.1, 0.2, 0.3, 0.4], [0.5, 0.0], [0.6]], garbage),
        "entropy": padded([[1.0, 1.0, 1.0, 1.0], [2.0, 2.0], [6.0]], garbage),
    }
    return Rollout(**{**fields, **overrides})


def make_targets(garbage=0.0):
    return Targets(
        rewards=padded([[0.0, 0.0, 0.0, 1.0], [0.5, 2.5], [-1.0]], garbage),
        advantages=padded([[0.0] * 4, [0.0] * 2, [0.0]], garbage),
        returns=padded([[2.0, 2.0, 2.0, 2.0], [3.0, 3.0], [-7.0]], garbage),
    )


GARBAGE = [0.0, 1e9, NAN, INF, -INF]


@pytest.mark.parametrize("garbage", GARBAGE)
def test_rollout_metrics_by_hand_whatever_stands_in_padding(garbage):
    # kills: .mean() over padding, mean of row means, sum for mean over completions, unbiased std
    assert rollout_metrics(make_rollout(garbage)) == pytest.approx(
        {
            "score": 1.0,
            "score_std": math.sqrt(8 / 3),
            "score_min": -1.0,
            "score_max": 3.0,
            "ref_kl": 2.1 / 7,
            "ref_kl_per_completion": (1.0 + 0.5 + 0.6) / 3,
            "entropy": (4 + 4 + 6) / 7,
            "completion_length": 7 / 3,
            "completion_length_max": 4.0,
            "eos_rate": 2 / 3,
            "reward/f": 4.0,
            "reward/f_std": 2.0,
            "reward/g": 1.0,
            "reward/g_std": 0.0,
        },
        rel=1e-6,
    )


@pytest.mark.parametrize("garbage", GARBAGE)
def test_target_metrics_by_hand_whatever_stands_in_padding(garbage):
    # kills: .mean() over padding, values and returns swapped in the explained variance, ref_kl for kl
    returns, values = [2, 2, 2, 2, 3, 3, -7], [1, 2, 3, 4, 0, 0, 4]
    residual = torch.tensor([float(r - v) for r, v in zip(returns, values, strict=True)])
    spread = torch.tensor([float(r) for r in returns])
    assert target_metrics(make_rollout(garbage), make_targets(garbage)) == pytest.approx(
        {
            "reward_per_completion": (1.0 + 3.0 - 1.0) / 3,
            "kl_estimate": 0.7 / 7,
            "value": 14 / 7,
            "return": 7 / 7,
            "explained_variance": 1 - float(residual.var(correction=0) / spread.var(correction=0)),
        },
        rel=1e-5,
        abs=1e-7,
    )


def test_a_function_that_applied_to_nothing_has_no_metric():
    # kills: NaN, or the 0 of an empty mean, for "not applicable"
    rollout = make_rollout(rewards_by_function={"f": torch.full((3,), NAN), "g": torch.tensor([NAN, NAN, 5.0])})
    metrics = rollout_metrics(rollout)
    assert "reward/f" not in metrics
    assert "reward/f_std" not in metrics
    assert (metrics["reward/g"], metrics["reward/g_std"]) == (5.0, 0.0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_everything_is_a_python_float_and_strict_json(dtype):
    # kills: 0-d tensors, numpy scalars or ints among the metrics, NaN from constant returns
    rollout = make_rollout(NAN, scores=torch.full((3,), 2.0, dtype=dtype))
    constant = Targets(*[torch.where(MASK, 2.0, NAN)] * 3)
    metrics = rollout_metrics(rollout) | target_metrics(rollout, constant)
    assert {name: value for name, value in metrics.items() if type(value) is not float} == {}
    json.dumps(metrics, allow_nan=False)


def test_one_completion_of_one_token():
    # kills: unbiased estimators, which divide by n - 1
    rollout = make_rollout().head(1)
    one = Rollout(**{
        name: value[:, :1] if getattr(value, "ndim", 0) == 2 else value for name, value in vars(rollout).items()
    })  # fmt: skip
    metrics = rollout_metrics(one) | target_metrics(one, Targets(*[torch.ones(1, 1)] * 3))
    assert (metrics["score_std"], metrics["completion_length"], metrics["ref_kl"]) == (0.0, 1.0, pytest.approx(0.1))
    json.dumps(metrics, allow_nan=False)


@pytest.mark.parametrize("garbage", GARBAGE)
def test_completion_rows_by_hand(garbage):
    # kills: ref_kl summed instead of averaged or averaged over padding, columns of different rows mixed
    rollout = make_rollout(garbage, logged_columns={"note": ["a", None, {"b": 1}]})
    rows = completion_rows(rollout, 10, split="train", iteration=4)
    assert [list(row) for row in rows] == [
        ["split", "iteration", "prompt", "completion", "score", "ref_kl", "length", "ended",
         "reward/f", "reward/g", "logged/note"]
    ] * 3  # fmt: skip
    assert [tuple(row.values()) for row in rows] == [
        ("train", 4, "p0", "c0", 1.0, pytest.approx(0.25), 4, False, 2.0, 1.0, "a"),
        ("train", 4, "p1", "c1", 3.0, pytest.approx(0.25), 2, True, None, 1.0, None),
        ("train", 4, "p2", "c2", -1.0, pytest.approx(0.6), 1, True, 6.0, 1.0, {"b": 1}),
    ]
    assert [type(value) for value in rows[0].values()][:-1] == [str, int, str, str, float, float, int, bool,
                                                                float, float]  # fmt: skip
    json.dumps(rows, allow_nan=False)


def test_logged_metrics_are_means_over_those_who_logged():
    # kills: NaN of a process that logged nothing in the mean, or counted as 0
    rollout = make_rollout(logged_metrics={"length": torch.tensor([2.0, 2.0, NAN])})
    assert rollout_metrics(rollout)["logged/length"] == 2.0


@pytest.mark.parametrize(("count", "expected"), [(0, 0), (1, 1), (3, 3), (99, 3)])
def test_completion_rows_stop_at_the_count(count, expected):
    # kills: all rows, or an IndexError
    assert len(completion_rows(make_rollout(), count)) == expected


IN_THE_LOSS = {"kl_placement": "loss", "kl_estimator": "full"}


def make_trainer(args, tokenizer):
    return PPOTrainer(
        make_model("llama"),
        [
            lambda completions: [None if "a" in c else float(len(c)) for c in completions],
            lambda prompts: [0.5] * len(prompts),
        ],
        args,
        [{"prompt": text[:9]} for text in TEXTS],
        processing_class=tokenizer,
        peft_config=make_lora("llama"),
        eval_dataset=[{"prompt": text[:5]} for text in TEXTS],
    )


def test_metrics_of_a_training_run_are_python_floats(tokenizer, config_factory):
    # kills: tensors or ints among the metrics of update and trainer
    args = config_factory(target_kl=1.0, max_approx_kl=10.0, entropy_coef=0.1, **IN_THE_LOSS)
    trainer = make_trainer(args, tokenizer)
    metrics = trainer.train()
    evaluation = trainer.evaluate()
    assert {name: v for name, v in (metrics | evaluation).items() if type(v) is not float} == {"iteration": 2}
    json.dumps(trainer.state.log_history, allow_nan=False)
    assert all(name.startswith("eval_") for name in evaluation)
    assert metrics["reward/lambda_1"] == 0.5


# Found by breaking it


def test_every_metric_is_documented(tokenizer, config_factory):
    # kills: a metric that docs/metrics.md leaves out
    trainer = make_trainer(config_factory(max_approx_kl=10.0, entropy_coef=0.1, **IN_THE_LOSS), tokenizer)
    trainer.train()
    documented = set(re.findall(r"`([^`]+)`", (Path(__file__).parents[1] / "docs" / "metrics.md").read_text()))
    logged = {re.sub("^eval_", "", name) for log in trainer.state.log_history for name in log}
    assert {name for name in logged if not name.startswith("reward/")} - documented == set()
