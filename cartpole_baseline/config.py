"""Settings of both algorithms, checked when they are made. Names are those of `rlhf_kit.PPOConfig` where it has them.

Each algorithm has only the settings it uses, so a setting of the other one is an error, not a no-op.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, get_type_hints


def _help(text: str) -> dict[str, str]:
    return {"help": text}


@dataclass(kw_only=True)
class _Config:
    """What PPO and REINFORCE have in common.

    Raises:
        TypeError: a value that is not a number, or not a whole one where a count is expected.
        ValueError: a value out of range.
    """

    seed: int = field(default=0, metadata=_help("Fixes initial weights, environments, sampling and shuffling."))
    total_steps: int = field(default=30_000, metadata=_help("Environment steps to train for, over all environments."))
    hidden_size: int = field(default=64, metadata=_help("Width of the two tanh layers of each network."))
    gamma: float = field(default=0.99, metadata=_help("Discount per step, in [0, 1]."))
    entropy_coef: float = field(default=0.01, metadata=_help("Weight of the entropy bonus (nats); 0 = none."))
    whiten_advantages: bool = field(
        default=True, metadata=_help("Give the advantages of each batch mean 0 and variance 1.")
    )
    adam_epsilon: float = field(default=1e-5, metadata=_help("Adam's epsilon."))
    max_grad_norm: float = field(
        default=0.5, metadata=_help("Clip the gradient of each network to this norm; inf = off.")
    )

    def __post_init__(self) -> None:
        for name, kind in get_type_hints(type(self)).items():
            self._check_type(name, kind)
        self._require(["seed"], lambda x: 0 <= x < 2**32, "at least 0 and below 2**32")
        self._require(["entropy_coef"], lambda x: 0 <= x < math.inf, "at least 0 and finite")
        self._require(["total_steps", "hidden_size"], lambda x: x >= 1, "at least 1")
        self._require(["gamma"], lambda x: 0 <= x <= 1, "in [0, 1]")
        self._require(["adam_epsilon"], lambda x: 0 < x < math.inf, "above 0 and finite")
        self._require(["max_grad_norm"], lambda x: x > 0, "above 0 (inf = off)")

    def _check_type(self, name: str, kind: Any) -> None:
        value, optional = getattr(self, name), "None" in str(kind)
        if value is None and optional:
            return
        accepted = bool if kind is bool else int if kind is int else (int, float)
        if not isinstance(value, accepted) or (isinstance(value, bool) and kind is not bool):
            wanted = "True or False" if kind is bool else "a whole number" if kind is int else "a number"
            raise TypeError(f"{name} must be {wanted}{' or None' if optional else ''}, got {value!r}.")

    def _require(self, names: list[str], holds: Callable[[float], bool], expected: str) -> None:
        for name in names:
            value = getattr(self, name)
            if value is not None and not holds(value):
                raise ValueError(f"{name} must be {expected}, got {value}.")


@dataclass(kw_only=True)
class PPOConfig(_Config):
    """Settings of PPO."""

    num_steps: int = field(default=128, metadata=_help("Steps of each environment in one rollout."))
    num_mini_batches: int = field(
        default=4, metadata=_help("Mini-batches that each epoch cuts the rollout into; one optimizer step each.")
    )
    ppo_epochs: int = field(default=6, metadata=_help("Passes over each rollout."))
    learning_rate: float = field(default=4e-3, metadata=_help("Of the actor, for the first rollout."))
    value_learning_rate: float = field(default=1e-2, metadata=_help("Of the critic, for the first rollout."))
    final_lr_fraction: float = field(
        default=0.01,
        metadata=_help("Share of both learning rates at the last rollout, linear in between; 1 = constant."),
    )
    gae_lambda: float = field(
        default=0.95, metadata=_help("0 = trust the critic after one step, 1 = full returns; in [0, 1].")
    )
    clip_range: float = field(
        default=0.2, metadata=_help("Stop rewarding ratios beyond 1 +- this; inf = no clipping.")
    )
    value_clip_range: float | None = field(
        default=None, metadata=_help("Clip the new value to the old one +- this, in reward units. None = no clipping.")
    )
    value_coef: float = field(default=0.5, metadata=_help("Weight of the value loss (which has the factor 1/2)."))
    max_approx_kl: float | None = field(
        default=None, metadata=_help("End an update after an epoch that leaves approx_kl (nats) above this.")
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        self._require(["num_steps"], lambda x: x >= 2, "at least 2 (one of them may be a reset)")
        self._require(["num_mini_batches", "ppo_epochs"], lambda x: x >= 1, "at least 1")
        self._require(["learning_rate", "value_learning_rate"], lambda x: 0 < x < math.inf, "above 0 and finite")
        self._require(["value_coef"], lambda x: 0 < x < math.inf, "above 0 and finite")
        self._require(["gae_lambda", "final_lr_fraction"], lambda x: 0 <= x <= 1, "in [0, 1]")
        self._require(["clip_range"], lambda x: x > 0, "above 0 (inf = no clipping)")
        self._require(["value_clip_range", "max_approx_kl"], lambda x: x > 0, "above 0, or left out")

    def num_updates(self, num_envs: int) -> int:
        """Whole rollouts that fit into `total_steps`.

        Raises:
            ValueError: not one fits, or a rollout may hold fewer real steps than there are mini-batches.
        """
        rollout = num_envs * self.num_steps
        if self.total_steps < rollout:
            raise ValueError(
                f"total_steps={self.total_steps} is less than one rollout of num_envs={num_envs} x "
                f"num_steps={self.num_steps} = {rollout} steps: raise total_steps or lower the others."
            )
        real = num_envs * (self.num_steps // 2)
        if self.num_mini_batches > real:
            raise ValueError(
                f"num_mini_batches={self.num_mini_batches} is more than the {real} steps that a rollout of "
                f"num_envs={num_envs} x num_steps={self.num_steps} is sure to hold "
                "(every second step may be a reset): lower num_mini_batches."
            )
        return self.total_steps // rollout


@dataclass(kw_only=True)
class ReinforceConfig(_Config):
    """Settings of REINFORCE. A batch is one whole episode of every environment, and gets one optimizer step."""

    learning_rate: float = field(default=1e-2, metadata=_help("Constant."))

    def __post_init__(self) -> None:
        super().__post_init__()
        self._require(["learning_rate"], lambda x: 0 < x < math.inf, "above 0 and finite")
