"""Hostile settings: each is refused with one clear error that names it, or is a config that runs."""

import dataclasses
import json
import math
import typing
from decimal import Decimal
from fractions import Fraction
from pathlib import Path

import numpy as np
import pytest
import torch
from conftest import TEXTS, make_lora, make_model, make_tokenizer
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from rlhf_kit import PPOConfig, PPOTrainer

FIELDS = [f.name for f in dataclasses.fields(PPOConfig)]
HINTS = typing.get_type_hints(PPOConfig)
REPRODUCIBLE = {
    "derandomize": True, "database": None, "deadline": None, "suppress_health_check": list(HealthCheck),
}  # fmt: skip

NASTY = [
    None, True, False, 0, -1, 1, 2, 7, 10**30, -(10**30), 0.0, -0.0, 0.5, 1.0, -1.5, 1e-300, 1e300, 1e39, math.nan,
    math.inf, -math.inf, "", "1", "0.5", "true", "None", "k1", "loss", "mlp", "cosine", "\x00", "a\x00b", "\ud800",
    "../../etc", "a/b", "x" * 5000, b"1", [], [1], [0.5], ["a"], [""], [None], [[1]], [math.nan], [True], (), (1,), {},
    {"a": 1}, {1}, object(), int, len, Decimal("0.5"), Fraction(1, 2), 1j, np.int64(3), np.float64(0.5),
    np.float32(0.5), np.bool_(True), np.array([1]), torch.tensor(1), torch.tensor([1.0]), Path("x"), range(3),
]  # fmt: skip
short_lists = st.lists(st.one_of(st.integers(), st.text()), max_size=3)
values = st.one_of(st.sampled_from(NASTY), st.integers(), st.floats(), st.text(), short_lists)

# What every accepted config satisfies, said without looking at the code: name -> test.
POSITIVE_INTS = ["rollout_batch_size", "mini_batch_size", "micro_batch_size", "ppo_epochs", "num_iterations",
                 "max_completion_length", "num_completions_per_prompt", "log_every"]  # fmt: skip
OPTIONAL_POSITIVE_INTS = ["generation_batch_size", "max_prompt_length", "text_prompt_length", "eval_every",
                          "save_every", "save_total_limit"]  # fmt: skip
POSITIVE = ["temperature", "adam_epsilon", "clip_range", "kl_horizon"]
OPTIONAL_POSITIVE = ["max_grad_norm", "value_clip_range", "clip_scores", "target_kl", "max_approx_kl"]
NOT_NEGATIVE = ["learning_rate", "weight_decay", "value_coef", "entropy_coef", "kl_coef"]
FLAGS = ["truncate_prompts", "whiten_advantages", "whiten_rewards", "scale_scores", "load_in_8bit", "load_in_4bit",
         "gradient_checkpointing"]  # fmt: skip


def is_int(x):
    return type(x) is int


def is_number(x):
    return type(x) is float


def assert_legal(config):
    for name in POSITIVE_INTS:
        assert is_int(getattr(config, name)) and getattr(config, name) >= 1, name  # noqa: PT018
    for name in OPTIONAL_POSITIVE_INTS:
        value = getattr(config, name)
        assert value is None or (is_int(value) and value >= 1), name
    for name in POSITIVE:
        assert is_number(getattr(config, name)) and 0 < getattr(config, name) < math.inf, name  # noqa: PT018
    for name in OPTIONAL_POSITIVE:
        value = getattr(config, name)
        assert value is None or (is_number(value) and 0 < value < math.inf), name
    for name in NOT_NEGATIVE:
        assert is_number(getattr(config, name)) and 0 <= getattr(config, name) < math.inf, name  # noqa: PT018
    for name in FLAGS:
        assert type(getattr(config, name)) is bool, name
    assert isinstance(config.output_dir, str)
    assert 0 <= config.gamma <= 1
    assert 0 <= config.gae_lambda <= 1
    assert 0 <= config.adam_beta1 < 1
    assert 0 <= config.adam_beta2 < 1
    assert 0 < config.top_p <= 1
    assert config.mini_batch_size <= config.rollout_batch_size
    assert config.rollout_batch_size % config.num_completions_per_prompt == 0
    assert config.kl_estimator in ("k1", "k2", "k3", "full")
    assert config.kl_placement in ("reward", "loss")
    assert (config.kl_placement, config.kl_estimator) != ("loss", "k1")
    assert config.value_head in ("linear", "mlp")
    assert config.dtype in ("auto", "float32", "bfloat16")
    for name in ("stop", "stop_token_ids", "reward_weights", "report_to"):
        value = getattr(config, name)
        assert value is None or isinstance(value, list), name
    json.dumps(dataclasses.asdict(config), allow_nan=False)


def made(**changes):
    """The config, or None if it was refused with one clear error that names a field."""
    refusal = None
    try:
        return PPOConfig(**changes)
    except (TypeError, ValueError) as error:
        refusal = error
    assert type(refusal) in (TypeError, ValueError)  # no UnicodeEncodeError, JSONDecodeError and the like
    assert any(name in str(refusal) for name in changes), f"{changes}: {refusal}"
    return None


def test_every_nasty_value_in_every_field():
    # kills: bool taken for int, a NaN or an infinity let through, an array compared inside a check
    refused = 0
    for name in FIELDS:
        for value in NASTY:
            config = made(**{name: value})
            refused += config is None
            if config is not None:
                assert_legal(config)
    assert refused > 2500
    assert len(FIELDS) * len(NASTY) > 3000


@settings(max_examples=1500, **REPRODUCIBLE)
@given(st.dictionaries(st.sampled_from(FIELDS), values, min_size=1, max_size=4))
def test_any_values_in_several_fields(changes):
    # kills: a combination that slips through or ends in an error that names nothing
    config = made(**changes)
    if config is not None:
        assert_legal(config)


@pytest.mark.parametrize("name", ["learning_rat", "", "output-dir", "kl coef", "__class__"])
def test_unknown_settings_are_errors(name):
    # kills: a mistyped setting swallowed
    with pytest.raises(TypeError, match="unexpected keyword"):
        PPOConfig(**{name: 1})


# What is accepted runs

sizes = st.integers(1, 7)


@st.composite
def legal(draw):
    """Any combination of legal values, small enough to run."""
    completions = draw(st.integers(1, 2))
    rollout = completions * draw(st.integers(1, 4))
    placement = draw(st.sampled_from(["reward", "loss"]))
    target_kl = draw(st.none() | st.floats(1e-6, 10))
    some = {
        "rollout_batch_size": rollout,
        "num_completions_per_prompt": completions,
        "mini_batch_size": draw(st.integers(1, rollout)),
        "micro_batch_size": draw(sizes),
        "generation_batch_size": draw(st.none() | sizes),
        "ppo_epochs": draw(st.integers(1, 3)),
        "num_iterations": 2,
        "max_completion_length": draw(sizes),
        "temperature": draw(st.floats(0.05, 20)),
        "stop_token_ids": draw(st.none() | st.lists(st.integers(0, 299), min_size=1, max_size=80)),
        "stop": draw(st.none() | st.lists(st.sampled_from(["e", ".", " the", "\u00e9"]), min_size=1, max_size=3)),
        "missing_eos_penalty": draw(st.none() | st.floats(0, 100)),
        "learning_rate": draw(st.sampled_from([0, 1e-5, 1e-2, 10.0])),
        "value_learning_rate": draw(st.none() | st.sampled_from([0, 1e-2, 1.0])),
        "lr_scheduler_type": draw(st.sampled_from(["linear", "cosine", "constant_with_warmup", "inverse_sqrt"])),
        "warmup_iterations": draw(st.integers(0, 1)),
        "adam_beta1": draw(st.sampled_from([0, 0.9])),
        "weight_decay": draw(st.sampled_from([0, 0.1])),
        "max_grad_norm": draw(st.none() | st.floats(1e-3, 10)),
        "clip_range": draw(st.floats(1e-3, 2)),
        "value_clip_range": draw(st.none() | st.floats(1e-3, 2)),
        "value_coef": draw(st.sampled_from([0, 0.1, 10])),
        "entropy_coef": draw(st.sampled_from([0, 0.01, 1])),
        "gamma": draw(st.floats(0, 1)),
        "gae_lambda": draw(st.floats(0, 1)),
        "whiten_advantages": draw(st.booleans()),
        "whiten_rewards": draw(st.booleans()),
        "scale_scores": draw(st.booleans()),
        "clip_scores": draw(st.none() | st.floats(1e-3, 100)),
        "kl_coef": draw(st.floats(1e-3, 100)) if target_kl else draw(st.sampled_from([0, 0.1, 100])),
        "kl_placement": placement,
        "kl_estimator": draw(st.sampled_from(["k2", "k3", "full"] + ["k1"] * (placement == "reward"))),
        "target_kl": target_kl,
        "max_approx_kl": draw(st.none() | st.floats(1e-4, 1)),
        "value_head": draw(st.sampled_from(["linear", "mlp"])),
        "gradient_checkpointing": draw(st.booleans()),
        "log_every": draw(st.integers(1, 3)),
        "save_every": draw(st.none() | st.just(2)),
        "log_completions": draw(st.integers(0, 9)),
        "seed": draw(st.integers(0, 2**32 - 1)),
    }  # fmt: skip
    return some, draw(st.sampled_from([0.0, 1.0, -1e6, 1e12]))


def run_once(chosen, folder):
    """Two iterations; everything that is logged is a number, and the weights moved if they were to."""
    changes, scale = chosen
    trainer = PPOTrainer(
        make_model("gpt2"),
        lambda completions: [scale * len(text) for text in completions],
        PPOConfig(output_dir=str(folder), **changes),
        [{"prompt": text[: 1 + 5 * i]} for i, text in enumerate(TEXTS)],
        processing_class=make_tokenizer(),
        peft_config=make_lora("gpt2"),
    )
    before = {name: p.detach().clone() for name, p in trainer.model.named_parameters()}
    trainer.train()
    assert trainer.state.iteration == 2
    for line in trainer.state.log_history:
        assert all(math.isfinite(value) for value in line.values()), line
    assert trainer.state.log_history[0]["ref_kl"] == pytest.approx(0, abs=1e-5)
    moved = {name for name, p in trainer.model.named_parameters() if not torch.equal(p, before[name])}
    assert not any("lora" not in name and "v_head" not in name for name in moved)
    if changes["learning_rate"] == 0:
        assert not any("lora" in name for name in moved)
    for line in (folder / "log.jsonl").read_text().splitlines():
        json.loads(line, parse_constant=pytest.fail)


def run_examples(count, folder):
    ran = 0

    @settings(max_examples=count, **REPRODUCIBLE)
    @given(legal())
    def run(chosen):
        nonlocal ran
        ran += 1
        run_once(chosen, folder / str(ran))

    run()
    print(f"{ran} configurations ran")
    assert ran >= count


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_accepted_settings_run(tmp_path, one_thread):
    # kills: a combination that divides by zero, loses a row, logs NaN or moves the base
    run_examples(25, tmp_path)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::UserWarning")
def test_many_accepted_settings_run(tmp_path, one_thread):
    # kills: the same, rarer combinations
    run_examples(120, tmp_path)
