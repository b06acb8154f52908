"""The adaptive KL coefficient."""

import json
import math

import pytest
from conftest import TEXTS, make_lora, make_model

import rlhf_kit.trainer
from rlhf_kit import PPOTrainer
from rlhf_kit.kl_control import adapted_kl_coef

PUBLISHED = {"target_kl": 6.0, "horizon": 10_000, "num_completions": 256}


@pytest.mark.parametrize(
    ("kl", "expected"),
    [(6, 0.2), (12, 0.201024), (0, 0.198976), (6.6, 0.200512), (5.4, 0.199488), (1e9, 0.201024), (-50, 0.198976)],
)
def test_worked_numbers(kl, expected):
    # kills: clip dropped, sign of the error, n/horizon forgotten, target/kl for kl/target
    assert adapted_kl_coef(0.2, kl=kl, **PUBLISHED) == pytest.approx(expected, rel=1e-12)


def test_factor_belongs_to_the_coefficient():
    # kills: coef + error instead of coef * (1 + error)
    assert adapted_kl_coef(2.0, kl=12, **PUBLISHED) == pytest.approx(2.01024)
    assert adapted_kl_coef(0.0, kl=12, **PUBLISHED) == 0


def test_twice_the_completions_move_it_twice_as_far():
    # kills: num_completions ignored
    one = adapted_kl_coef(1.0, kl=100, target_kl=1, horizon=1000, num_completions=10) - 1
    two = adapted_kl_coef(1.0, kl=100, target_kl=1, horizon=1000, num_completions=20) - 1
    assert two == pytest.approx(2 * one)


@pytest.mark.parametrize("n", [5, 6, 1000])
def test_never_below_zero(n):
    # kills: the outer max
    assert adapted_kl_coef(0.2, kl=0, target_kl=1, horizon=1, num_completions=n) == 0
    assert not math.copysign(1, adapted_kl_coef(0.2, kl=0, target_kl=1, horizon=1, num_completions=n)) < 0


def test_the_trainer_steers_by_the_kl_it_logs(tokenizer, config_factory, monkeypatch):
    # kills: KL per token instead of per completion, the coefficient of the next iteration logged
    asked = []

    def watched(kl_coef, **kwargs):
        asked.append((kl_coef, kwargs))
        return adapted_kl_coef(kl_coef, **kwargs)

    monkeypatch.setattr(rlhf_kit.trainer, "adapted_kl_coef", watched)
    args = config_factory(
        num_iterations=4, target_kl=0.01, kl_horizon=100.0, kl_coef=0.3, learning_rate=1e-2, log_completions=0
    )
    trainer = PPOTrainer(
        make_model("llama"),
        lambda completions: [float(len(c)) for c in completions],
        args,
        [{"prompt": text[:9]} for text in TEXTS],
        processing_class=tokenizer,
        peft_config=make_lora("llama"),
    )
    trainer.train()
    with open(f"{args.output_dir}/log.jsonl", encoding="utf-8") as file:
        logs = [json.loads(line) for line in file]
    assert logs[0]["kl_coef"] == 0.3
    fixed = {"target_kl": 0.01, "horizon": 100.0, "num_completions": 8}
    assert asked == [(log["kl_coef"], {"kl": log["ref_kl_per_completion"], **fixed}) for log in logs]
    for (kl_coef, kwargs), following in zip(asked, [*logs[1:], {"kl_coef": trainer.state.kl_coef}], strict=True):
        assert following["kl_coef"] == adapted_kl_coef(kl_coef, **kwargs)
    assert len({log["kl_coef"] for log in logs}) > 2


# Found by breaking it


@pytest.mark.parametrize("kl", [math.nan, math.inf])
def test_one_bad_rollout_does_not_poison_the_coefficient(kl):
    # kills: min(max(nan, -.2), .2) is nan: the coefficient stays NaN after the rollout that was not finite is gone
    assert math.isfinite(adapted_kl_coef(0.2, kl=kl, **PUBLISHED))
