"""Rollouts: sampled completions, and what policy, critic and reference think of them.

Everything in a `Rollout` is fixed once collected; the update only reads it.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import gather_object
from torch import Tensor

from rlhf_kit.config import PPOConfig
from rlhf_kit.data import pad_left, pad_right
from rlhf_kit.functional import (
    entropy_from_logits,
    estimate_kl,
    full_kl,
    token_logprobs,
)
from rlhf_kit.modeling import AutoModelForCausalLMWithValueHead
from rlhf_kit.processes import passes
from rlhf_kit.rewards import Rewards


@dataclass(frozen=True)
class Rollout:
    """Completions of the policy at one moment, with all that was recorded about them.

    B completions, P = longest prompt, T = longest completion. Padding of the float fields holds 0.
    """

    prompts: list[Any]  # B, as in the dataset
    completions: list[Any]  # B, as the reward functions saw them
    prompt_ids: Tensor  # (B, P) int64, left-padded
    prompt_mask: Tensor  # (B, P) bool, True = real token
    completion_ids: Tensor  # (B, T) int64, right-padded
    completion_mask: Tensor  # (B, T) bool, True = real token, the end token included
    ended: Tensor  # (B,) bool, stopped by itself rather than by max_completion_length
    scores: Tensor  # (B,) float32, weighted sum of the reward functions, raw
    token_rewards: Tensor  # (B, T) float32, the part of the scores that was given to single tokens
    rewards_by_function: dict[str, Tensor]  # name -> (B,) float32, NaN = not applicable
    logged_columns: dict[str, list[Any]]  # name -> B values, as reward functions logged them
    logged_metrics: dict[str, Tensor]  # name -> (B,) float32, what was logged for the batch a completion was in
    old_logprobs: Tensor  # (B, T) float32, nats, of the policy that sampled
    old_values: Tensor  # (B, T) float32, score units
    ref_logprobs: Tensor  # (B, T) float32, nats, of the reference
    kl: Tensor  # (B, T) float32, nats, by the chosen estimator: what the reward is shaped with
    ref_kl: Tensor  # (B, T) float32, nats, exact KL(policy || reference): what is logged
    entropy: Tensor  # (B, T) float32, nats

    def __len__(self) -> int:
        return len(self.prompts)

    def to(self, device: torch.device | str) -> "Rollout":
        """The same rollout with its tensors on another device."""

        def moved(value: Any) -> Any:
            if isinstance(value, dict):
                return {name: moved(part) for name, part in value.items()}
            return value.to(device) if isinstance(value, Tensor) else value

        return Rollout(**{f.name: moved(getattr(self, f.name)) for f in fields(self)})

    def head(self, count: int) -> "Rollout":
        """The first `count` completions."""

        def first(value: Any) -> Any:
            return {n: t[:count] for n, t in value.items()} if isinstance(value, dict) else value[:count]

        return Rollout(**{f.name: first(getattr(self, f.name)) for f in fields(self)})

    def tokens(self, rows: Tensor | slice) -> dict[str, Tensor]:
        """Ids and masks of some rows, as `trimmed_inputs` takes them."""
        names = ("prompt_ids", "prompt_mask", "completion_ids", "completion_mask")
        return {name: getattr(self, name)[rows] for name in names}


# Recording


@torch.no_grad()
def record_policies(
    model: AutoModelForCausalLMWithValueHead,
    prompt_ids: list[list[int]],
    completion_ids: list[list[int]],
    args: PPOConfig,
    *,
    pad_token_id: int,
    autocast: Callable[[], Any],
) -> dict[str, Tensor]:
    """Score completions under the policy and the reference, in micro-batches.

    Args:
        model: policy, reference and critic.
        prompt_ids: B prompts, unpadded.
        completion_ids: B completions, unpadded, none empty.
        args: micro_batch_size, temperature, kl_estimator.
        pad_token_id: stands in padding.
        autocast: makes the context that forward passes run in.

    Returns:
        The token fields of `Rollout` by name: prompt_ids and prompt_mask (B, P), the others (B, T).
    """
    prompts, prompt_mask = pad_left(prompt_ids, pad_token_id)
    completions, completion_mask = pad_right(completion_ids, pad_token_id)
    tokens = {
        "prompt_ids": prompts.to(model.device),
        "prompt_mask": prompt_mask.to(model.device),
        "completion_ids": completions.to(model.device),
        "completion_mask": completion_mask.to(model.device),
    }
    shape = completions.shape
    names = ("old_logprobs", "old_values", "ref_logprobs", "kl", "ref_kl", "entropy")
    recorded = {name: torch.zeros(shape, device=model.device) for name in names}
    for rows, idle in passes(model, shape[0], args.micro_batch_size):
        part = _record_micro_batch(model, {name: tensor[rows] for name, tensor in tokens.items()}, args, autocast)
        for name, values in part.items() if not idle else ():
            recorded[name][rows, : values.shape[1]] = values
    return tokens | recorded


def _record_micro_batch(
    model: AutoModelForCausalLMWithValueHead, tokens: dict[str, Tensor], args: PPOConfig, autocast: Callable[[], Any]
) -> dict[str, Tensor]:
    input_ids, attention_mask, width = trimmed_inputs(**tokens)
    ids = tokens["completion_ids"][:, :width]  # (b, T')
    mask = tokens["completion_mask"][:, :width]
    with autocast():
        logits, values = model.score(input_ids, attention_mask, completion_length=width)
        ref_logits = model.score_reference(input_ids, attention_mask, completion_length=width)
    logprobs = token_logprobs(logits, ids, temperature=args.temperature)
    ref_logprobs = token_logprobs(ref_logits, ids, temperature=args.temperature)
    scaled = logits.float() / args.temperature
    exact = full_kl(scaled, ref_logits.float() / args.temperature)
    kl = exact if args.kl_estimator == "full" else estimate_kl(logprobs, ref_logprobs, args.kl_estimator)
    part = {
        "old_logprobs": logprobs,
        "old_values": values,
        "ref_logprobs": ref_logprobs,
        "kl": kl,
        "ref_kl": exact,
        "entropy": entropy_from_logits(scaled),
    }
    return {name: torch.where(mask, tensor, 0) for name, tensor in part.items()}


def record_rollout(
    model: AutoModelForCausalLMWithValueHead,
    args: PPOConfig,
    *,
    prompts: list[Any],
    prompt_ids: list[list[int]],
    completions: list[Any],
    completion_ids: list[list[int]],
    ended: list[bool],
    rewards: Rewards,
    pad_token_id: int,
    accelerator: Accelerator,
) -> Rollout:
    """Score this process's completions under policy and reference, and join them with those of all processes.

    Args:
        model: policy, reference and critic.
        args: micro_batch_size, temperature, kl_estimator.
        prompts, prompt_ids, completions, completion_ids, ended: of this process, as in `Rollout`, ids unpadded.
        rewards: of this process.
        pad_token_id: stands in padding.
        accelerator: processes, and the precision of forward passes.

    Returns:
        The `Rollout` of all processes, the same on each of them.
    """
    device = model.device
    tokens = record_policies(
        model, prompt_ids, completion_ids, args, pad_token_id=pad_token_id, autocast=accelerator.autocast
    )
    rollout = Rollout(
        prompts=prompts,
        completions=completions,
        ended=torch.tensor(ended, device=device),
        scores=rewards.scores.to(device),
        token_rewards=(
            torch.zeros(tokens["completion_ids"].shape, device=device)
            if rewards.token_rewards is None
            else rewards.token_rewards.to(device)
        ),
        rewards_by_function={name: values.to(device) for name, values in rewards.by_function.items()},
        logged_columns=rewards.columns,
        logged_metrics={n: torch.full((len(prompts),), v, device=device) for n, v in rewards.metrics.items()},
        **tokens,
    )
    if accelerator.num_processes == 1:
        return rollout
    return concat_rollouts([part.to(device) for part in gather_object([rollout.to("cpu")])])


def trimmed_inputs(
    prompt_ids: Tensor, prompt_mask: Tensor, completion_ids: Tensor, completion_mask: Tensor
) -> tuple[Tensor, Tensor, int]:
    """Inputs of a scoring pass without columns in which every row has padding.

    Args:
        prompt_ids: (b, P) left-padded.
        prompt_mask: (b, P) True = real token.
        completion_ids: (b, T) right-padded.
        completion_mask: (b, T) True = real token.

    Returns:
        (input_ids (b, P' + T'), attention_mask (b, P' + T') int64, T').
    """
    first = prompt_ids.shape[1] - int(prompt_mask.sum(-1).max())
    width = int(completion_mask.sum(-1).max())
    ids = torch.cat([prompt_ids[:, first:], completion_ids[:, :width]], dim=1)
    mask = torch.cat([prompt_mask[:, first:], completion_mask[:, :width]], dim=1)
    return ids, mask.long(), width


def concat_rollouts(parts: Sequence[Rollout]) -> Rollout:
    """One rollout from those of all processes, in order, padded to common widths."""
    if len(parts) == 1:
        return parts[0]
    device = parts[0].scores.device
    prompt_width = max(part.prompt_ids.shape[1] for part in parts)
    completion_width = max(part.completion_ids.shape[1] for part in parts)

    def joined(name: str) -> Any:
        values = [getattr(part, name) for part in parts]
        if isinstance(values[0], list):
            return [item for value in values for item in value]
        if isinstance(values[0], dict):
            names = list(dict.fromkeys(key for value in values for key in value))
            columns = {key: [value.get(key, _missing(part)) for value, part in zip(values, parts, strict=True)]
                       for key in names}  # fmt: skip
            return {key: _end_to_end(column, device) for key, column in columns.items()}
        values = [value.to(device) for value in values]
        if values[0].ndim == 1:
            return torch.cat(values)
        if name.startswith("prompt"):
            return torch.cat([torch.nn.functional.pad(v, (prompt_width - v.shape[1], 0)) for v in values])
        return torch.cat([torch.nn.functional.pad(v, (0, completion_width - v.shape[1])) for v in values])

    return Rollout(**{f.name: joined(f.name) for f in fields(Rollout)})


def _missing(part: Rollout) -> list[None]:
    """Stands for what no reward function of one process logged."""
    return [None] * len(part)


def _end_to_end(column: list[Any], device: torch.device) -> Any:
    """Values of all processes in one list, or in one tensor if they are tensors; None becomes NaN there."""
    if not any(isinstance(values, Tensor) for values in column):
        return [value for values in column for value in values]
    nan = float("nan")
    tensors = [v if isinstance(v, Tensor) else torch.full((len(v),), nan) for v in column]
    return torch.cat([tensor.to(device) for tensor in tensors])
