"""PPOConfig: every setting of a run, checked when it is made.

A plain dataclass, so `TrlParser`/`HfArgumentParser` turn each field into a command-line flag and a YAML key. Sizes
that follow from others are methods, never fields. A setting that would do nothing in combination with the rest is an
error.

What one iteration does with the three sizes (here 8 completions, mini-batches of 4, micro-batches of 2, 2 processes):

    rollout   [0 1 2 3 4 5 6 7]               rollout_batch_size: completions sampled, scored and then learned from
    shuffle   [5 0 3 6 | 1 7 2 4]             again for each of ppo_epochs
    mini      [5 0 3 6]                       mini_batch_size: one optimizer step, all processes together
    process     [5 3] [0 6]                   each process takes every second row
    micro       [5 3] [0 6]                   micro_batch_size: one forward and backward on one device
"""

import math
import os
import sys
import typing
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, Literal

from rlhf_kit.annotations import describe, matches

SCHEDULES_WITH_WARMUP = ("linear", "cosine", "constant_with_warmup", "inverse_sqrt")


def _help(text: str) -> dict[str, str]:
    return {"help": text}


@dataclass(kw_only=True)
class PPOConfig:
    """Settings of a PPO run. Every field is a keyword, a flag and a YAML key of the same name.

    Raises:
        TypeError: a value of the wrong type.
        ValueError: a value out of range, or a combination in which some setting would have no effect.
    """

    # Where and what
    output_dir: str = field(default="runs/ppo", metadata=_help("Folder for logs and the trained model."))
    seed: int = field(default=0, metadata=_help("Fixes prompt order, sampling, shuffling and initial weights."))

    # Sizes
    rollout_batch_size: int = field(default=64, metadata=_help("Completions per iteration, over all processes."))
    mini_batch_size: int = field(
        default=16, metadata=_help("Completions per optimizer step, over all processes. The last may be smaller.")
    )
    micro_batch_size: int = field(
        default=8, metadata=_help("Completions per forward pass on one device. Changes memory and speed only.")
    )
    generation_batch_size: int | None = field(
        default=None,
        metadata=_help("Completions one device generates at once (bounds the KV cache). None = all of its share."),
    )
    ppo_epochs: int = field(default=4, metadata=_help("Passes over each rollout."))
    num_iterations: int = field(default=100, metadata=_help("Rollouts to collect and learn from."))

    # Prompts and sampling
    max_prompt_length: int | None = field(
        default=None,
        metadata=_help("Tokens. A longer prompt is refused, or cut if truncate_prompts. None = no limit."),
    )
    truncate_prompts: bool = field(
        default=False,
        metadata=_help(
            "Cut overlong prompts on the left, to max_prompt_length or what the context leaves, not refuse."
        ),
    )
    text_prompt_length: int | None = field(
        default=None, metadata=_help("Use the first N tokens of the dataset's raw 'text' column as the prompt.")
    )
    max_completion_length: int = field(default=64, metadata=_help("Tokens sampled per completion at most."))
    temperature: float = field(default=1.0, metadata=_help("Divides the logits in sampling and in all log-probs."))
    top_k: int = field(
        default=0, metadata=_help("Sample from the k likeliest tokens only; 0 = all. Above 0 biases PPO: avoid.")
    )
    top_p: float = field(
        default=1.0, metadata=_help("Sample from the smallest set with this probability. Below 1 biases PPO: avoid.")
    )
    stop: list[str] | None = field(
        default=None, metadata=_help("Strings that end a completion; they stay part of it.")
    )
    stop_token_ids: list[int] | None = field(
        default=None, metadata=_help("Token ids that end a completion, besides the model's own end tokens.")
    )
    num_completions_per_prompt: int = field(default=1, metadata=_help("Completions sampled for each prompt."))
    missing_eos_penalty: float | None = field(
        default=None,
        metadata=_help("Subtracted from the score of a completion that did not end by itself. Score units."),
    )

    # Optimizer
    learning_rate: float = field(
        default=1e-5,
        metadata=_help("Peak rate of policy weights. LoRA likes 1e-4 to 1e-3, full fine-tuning 1e-6 to 1e-5."),
    )
    value_learning_rate: float | None = field(
        default=None, metadata=_help("Peak rate of the critic: its head, and its adapter. None = learning_rate.")
    )
    lr_scheduler_type: str = field(
        default="linear",
        metadata=_help("linear or cosine (to 0 at the last iteration), constant, constant_with_warmup, inverse_sqrt."),
    )
    warmup_iterations: int = field(default=0, metadata=_help("Iterations over which the rate rises from 0."))
    adam_beta1: float = field(default=0.9, metadata=_help("AdamW's decay of the mean gradient."))
    adam_beta2: float = field(default=0.999, metadata=_help("AdamW's decay of the mean squared gradient."))
    adam_epsilon: float = field(
        default=1e-5, metadata=_help("AdamW's epsilon. 1e-8 makes the first steps of rarely used weights far larger.")
    )
    weight_decay: float = field(default=0.0, metadata=_help("AdamW's decoupled weight decay."))
    max_grad_norm: float | None = field(
        default=1.0, metadata=_help("Clips the norm of the whole gradient. None = no clipping.")
    )

    # The objective
    clip_range: float = field(default=0.2, metadata=_help("Probability ratio may leave 1 by this much for credit."))
    value_clip_range: float | None = field(
        default=0.2, metadata=_help("A value may move this far per rollout, in score units. None = no clipping.")
    )
    value_coef: float = field(default=0.1, metadata=_help("Weight of the value loss."))
    entropy_coef: float = field(default=0.0, metadata=_help("Weight of the entropy bonus."))
    gamma: float = field(default=1.0, metadata=_help("Discount per token."))
    gae_lambda: float = field(default=0.95, metadata=_help("0 = one-step advantages, 1 = full returns."))
    whiten_advantages: bool = field(default=True, metadata=_help("Centre and scale advantages over the rollout."))
    whiten_rewards: bool = field(
        default=False, metadata=_help("Scale per-token rewards to unit variance around their mean, which is kept.")
    )
    scale_scores: bool = field(
        default=False, metadata=_help("Divide scores by the running standard deviation of all scores so far.")
    )
    clip_scores: float | None = field(
        default=None, metadata=_help("Clip scores to +- this, after scaling. None = no clipping.")
    )
    reward_weights: list[float] | None = field(
        default=None, metadata=_help("One weight per reward function. None = 1 for each.")
    )

    # Distance to the reference
    kl_coef: float = field(default=0.05, metadata=_help("Weight of KL(policy || reference), score units per nat."))
    kl_estimator: Literal["k1", "k2", "k3", "full"] = field(
        default="k1", metadata=_help("How the KL of a token is measured; full = exact sum over the vocabulary.")
    )
    kl_placement: Literal["reward", "loss"] = field(
        default="reward", metadata=_help("Penalty inside the per-token reward, or a term of the loss (full or k2).")
    )
    target_kl: float | None = field(
        default=None, metadata=_help("Adapt kl_coef to hold this KL per completion, in nats. None = fixed kl_coef.")
    )
    kl_horizon: float = field(
        default=10_000, metadata=_help("Completions over which kl_coef adapts. Only with target_kl.")
    )
    max_approx_kl: float | None = field(
        default=None,
        metadata=_help("Stop updating on a rollout once new and old policy are this far apart, nats/token."),
    )

    # The model, when given by name
    value_head: Literal["linear", "mlp"] = field(
        default="linear", metadata=_help("linear: d to 1. mlp: d to 4d, ReLU, to 1.")
    )
    critic: Literal["shared", "adapter"] = field(
        default="shared",
        metadata=_help("shared: the value head reads the policy's trunk. adapter: a second adapter on the same base."),
    )
    load_in_8bit: bool = field(default=False, metadata=_help("Load the frozen base in int8 (bitsandbytes)."))
    load_in_4bit: bool = field(default=False, metadata=_help("Load the frozen base in 4 bits, NF4 (bitsandbytes)."))
    dtype: Literal["auto", "float32", "bfloat16"] = field(
        default="auto", metadata=_help("Precision of the base; auto = as in the checkpoint.")
    )
    gradient_checkpointing: bool = field(
        default=False, metadata=_help("Recompute layers in the backward pass: less memory, about a third slower.")
    )

    # Logging and saving
    log_every: int = field(default=1, metadata=_help("Iterations between log lines. The first and last always log."))
    eval_every: int | None = field(
        default=None, metadata=_help("Iterations between evaluations. None = before the first and after the last.")
    )
    save_every: int | None = field(
        default=10,
        metadata=_help("Iterations between checkpoints; the last is saved too. None = only on Ctrl-C or SIGTERM."),
    )
    save_total_limit: int | None = field(
        default=2, metadata=_help("Checkpoints kept; older ones are deleted. None = all.")
    )
    report_to: list[str] | None = field(
        default=None, metadata=_help("Trackers besides the log in output_dir: tensorboard, wandb, trackio, ...")
    )
    run_name: str | None = field(
        default=None, metadata=_help("Name of the run in trackers. None = output_dir's name.")
    )
    log_completions: int = field(
        default=4,
        metadata=_help("Completions written per logged iteration, and whether evaluations write theirs. 0 = none."),
    )

    def __post_init__(self) -> None:
        self._check_types()
        self.output_dir = os.path.expanduser(self.output_dir)
        self._check_ranges()
        self._check_combinations()

    def num_prompts_per_iteration(self) -> int:
        """Prompts drawn per iteration, over all processes."""
        return self.rollout_batch_size // self.num_completions_per_prompt

    def optimizer_steps_per_iteration(self) -> int:
        """Optimizer steps of an iteration that is not stopped early."""
        return self.ppo_epochs * math.ceil(self.rollout_batch_size / self.mini_batch_size)

    def _check_types(self) -> None:
        hints = typing.get_type_hints(type(self))
        for f in fields(self):
            value = getattr(self, f.name)
            if isinstance(value, tuple):
                value = list(value)
                setattr(self, f.name, value)
            if not matches(value, hints[f.name]):
                expected = describe(hints[f.name])
                raise TypeError(f"{f.name} must be {expected}, got {value!r} of type {type(value).__name__}.")
            if hints[f.name] in (float, float | None) and value is not None:
                fits = not abs(value) > sys.float_info.max  # an integer may be larger than any float
                setattr(self, f.name, float(value) if fits else math.inf if value > 0 else -math.inf)

    def _check_ranges(self) -> None:
        at_least_1 = [
            "rollout_batch_size", "mini_batch_size", "micro_batch_size", "generation_batch_size", "ppo_epochs",
            "num_iterations", "max_prompt_length", "text_prompt_length", "max_completion_length",
            "num_completions_per_prompt", "log_every", "eval_every", "save_every", "save_total_limit",
        ]  # fmt: skip
        at_least_0 = [
            "seed", "top_k", "warmup_iterations", "log_completions", "missing_eos_penalty", "learning_rate",
            "value_learning_rate", "weight_decay", "value_coef", "entropy_coef", "kl_coef",
        ]  # fmt: skip
        above_0 = [
            "temperature", "adam_epsilon", "max_grad_norm", "clip_range", "value_clip_range", "clip_scores",
            "target_kl", "kl_horizon", "max_approx_kl",
        ]  # fmt: skip
        between_0_and_1 = ["gamma", "gae_lambda"]
        for f in fields(self):
            value = getattr(self, f.name)
            numbers = [x for x in (value if isinstance(value, list) else [value]) if isinstance(x, float)]
            if not all(map(math.isfinite, numbers)):
                raise ValueError(f"{f.name} must be finite, got {value}.")
        self._require(at_least_1, lambda x: x >= 1, "at least 1")
        self._require(at_least_0, lambda x: x >= 0, "at least 0")
        self._require(above_0, lambda x: x > 0, "above 0")
        self._require(between_0_and_1, lambda x: 0 <= x <= 1, "in [0, 1]")
        self._require(["adam_beta1", "adam_beta2"], lambda x: 0 <= x < 1, "in [0, 1)")
        self._require(["top_p"], lambda x: 0 < x <= 1, "in (0, 1]")
        self._require(["lr_scheduler_type"], lambda x: x in (*SCHEDULES_WITH_WARMUP, "constant"),
                      f"one of {[*SCHEDULES_WITH_WARMUP, 'constant']}")  # fmt: skip
        self._require(["seed"], lambda x: x < 2**32, "below 2**32")
        self._require(["stop_token_ids"], lambda ids: ids and min(ids) >= 0, "a list of ids of at least 0, not empty")
        if not self.output_dir:
            raise ValueError("output_dir must not be empty: name a folder, such as 'runs/ppo'.")
        if self.stop is not None and (not self.stop or "" in self.stop):
            raise ValueError(
                f"stop must hold at least one string, none of them empty, got {self.stop}; or leave it None."
            )

    def _require(self, names: list[str], holds: typing.Callable[[Any], bool], expected: str) -> None:
        for name in names:
            value = getattr(self, name)
            if value is not None and not holds(value):
                raise ValueError(f"{name} must be {expected}, got {value!r}.")

    def _check_combinations(self) -> None:
        if self.mini_batch_size > self.rollout_batch_size:
            raise ValueError(
                f"mini_batch_size ({self.mini_batch_size}) is larger than rollout_batch_size "
                f"({self.rollout_batch_size}): an optimizer step cannot use more completions than were sampled. "
                "Lower the first or raise the second."
            )
        if self.rollout_batch_size % self.num_completions_per_prompt:
            raise ValueError(
                f"rollout_batch_size ({self.rollout_batch_size}) must be a multiple of num_completions_per_prompt "
                f"({self.num_completions_per_prompt})."
            )
        if self.load_in_8bit and self.load_in_4bit:
            raise ValueError("load_in_8bit and load_in_4bit are both True: choose one.")
        if self.text_prompt_length is not None and (self.truncate_prompts or self.max_prompt_length is not None):
            raise ValueError(
                f"text_prompt_length={self.text_prompt_length} already sets the length of every prompt: drop "
                "max_prompt_length and truncate_prompts."
            )
        if self.warmup_iterations and self.lr_scheduler_type == "constant":
            raise ValueError(
                f"warmup_iterations={self.warmup_iterations} has no effect with lr_scheduler_type='constant': "
                "use 'constant_with_warmup'."
            )
        if self.warmup_iterations >= self.num_iterations:
            raise ValueError(
                f"warmup_iterations ({self.warmup_iterations}) must be below num_iterations ({self.num_iterations}): "
                "the learning rate would never reach its peak."
            )
        if self.target_kl is not None and self.kl_coef == 0:
            raise ValueError(
                "target_kl adapts kl_coef by a factor, so it cannot leave kl_coef=0: start from a kl_coef above 0, "
                "or drop target_kl."
            )
        if self.target_kl is None and self.kl_horizon != PPOConfig.kl_horizon:
            raise ValueError(
                f"kl_horizon={self.kl_horizon} has no effect without target_kl: set target_kl, or drop kl_horizon."
            )
        if self.target_kl is not None and self.kl_horizon < self.rollout_batch_size:
            raise ValueError(
                f"kl_horizon ({self.kl_horizon}) must be at least rollout_batch_size ({self.rollout_batch_size}), or "
                "one rollout can push kl_coef to 0, from where it never returns."
            )
        if self.run_name is not None and Path(self.run_name).name != self.run_name:
            raise ValueError(
                f"run_name={self.run_name!r} must be a plain name, without slashes: folders are named after it."
            )
        if self.run_name is not None and not self.report_to:
            raise ValueError(
                f"run_name={self.run_name!r} names the run in trackers, but report_to is empty: set that, or drop "
                "run_name."
            )
        if self.kl_placement == "loss" and self.kl_estimator == "k1":
            raise ValueError(
                "kl_estimator='k1' has zero expected gradient as a loss, so the KL would go unpunished: use 'full' "
                "(exact) or 'k2' with kl_placement='loss', or kl_placement='reward'."
            )
