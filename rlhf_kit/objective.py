"""The PPO objective on a micro-batch: sums over tokens, so that splitting a batch never changes a gradient."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from rlhf_kit.config import PPOConfig
from rlhf_kit.functional import (
    approx_kl,
    clip_fraction,
    clipped_policy_loss,
    clipped_value_loss,
    entropy_from_logits,
    estimate_kl,
    full_kl,
    masked_sum,
    token_logprobs,
)
from rlhf_kit.modeling import AutoModelForCausalLMWithValueHead
from rlhf_kit.rollout import Rollout, trimmed_inputs
from rlhf_kit.targets import Targets


def ppo_loss(
    model: AutoModelForCausalLMWithValueHead,
    rollout: Rollout,
    targets: Targets,
    rows: Tensor,
    args: PPOConfig,
    *,
    kl_coef: float,
    autocast: Callable[[], Any],
) -> tuple[Tensor, dict[str, Tensor], Tensor]:
    """Sum of the per-token objective over some completions, to be minimised.

        policy + value_coef value - entropy_coef entropy + kl_coef KL        (the last only with kl_placement="loss")

    Args:
        model: the policy being updated.
        rollout: fixed records.
        targets: fixed advantages and returns.
        rows: (b,) int64, the completions of this micro-batch.
        args: coefficients and clip ranges.
        kl_coef: coefficient in force.
        autocast: makes the context that forward passes run in.

    Returns:
        (loss () summed over real tokens, {name: () detached sum over real tokens}, largest |ratio - 1| ()), float32.

    Source: the objective of Schulman et al. 2017, eq. 9 (arXiv:1707.06347), with the penalty to a reference.
    """
    tokens = rollout.tokens(rows)
    input_ids, attention_mask, width = trimmed_inputs(**tokens)
    ids, mask = tokens["completion_ids"][:, :width], tokens["completion_mask"][:, :width]  # (b, T')
    old_logprobs, old_values = rollout.old_logprobs[rows, :width], rollout.old_values[rows, :width]
    advantages, returns = targets.advantages[rows, :width], targets.returns[rows, :width]

    with autocast():
        logits, values = model.score(
            input_ids, attention_mask, completion_length=width, gradient_checkpointing=args.gradient_checkpointing
        )
    logits = logits.float() / args.temperature  # (b, T', V)
    # Padding gets the old numbers before any arithmetic of the loss: it counts as a token that has not moved.
    logprobs = torch.where(mask, token_logprobs(logits, ids), old_logprobs)
    values = torch.where(mask, values, old_values)

    policy = masked_sum(clipped_policy_loss(logprobs, old_logprobs, advantages, clip_range=args.clip_range), mask)
    value = masked_sum(clipped_value_loss(values, old_values, returns, value_clip_range=args.value_clip_range), mask)
    loss = policy + args.value_coef * value
    sums = {"policy_loss": policy, "value_loss": value}
    if args.entropy_coef:
        entropy = masked_sum(entropy_from_logits(logits), mask)
        loss = loss - args.entropy_coef * entropy
        sums["entropy_bonus"] = args.entropy_coef * entropy
    if args.kl_placement == "loss":
        kl = _kl_to_reference(
            model, logits, logprobs, rollout.ref_logprobs[rows, :width], mask, tokens, args, autocast
        )
        loss = loss + kl_coef * kl
        sums["kl_loss"] = kl_coef * kl

    sums |= _movement(logprobs, old_logprobs, values, old_values, mask, args)
    ratio_error = ((logprobs.detach() - old_logprobs).exp() - 1).abs().max()
    return loss, {name: total.detach() for name, total in sums.items()}, ratio_error


@torch.no_grad()
def _movement(
    logprobs: Tensor, old_logprobs: Tensor, values: Tensor, old_values: Tensor, mask: Tensor, args: PPOConfig
) -> dict[str, Tensor]:
    """How far policy and values have moved since the rollout, summed over real tokens."""
    count = mask.sum()
    sums = {
        "approx_kl": approx_kl(logprobs, old_logprobs, mask) * count,
        "clip_fraction": clip_fraction(logprobs, old_logprobs, mask, clip_range=args.clip_range) * count,
    }
    if args.value_clip_range is not None:
        moved = (values - old_values).abs() > args.value_clip_range
        sums["value_clip_fraction"] = masked_sum(moved.float(), mask)
    return sums


def _kl_to_reference(
    model: AutoModelForCausalLMWithValueHead,
    logits: Tensor,
    logprobs: Tensor,
    ref_logprobs: Tensor,
    mask: Tensor,
    tokens: dict[str, Tensor],
    args: PPOConfig,
    autocast: Callable[[], Any],
) -> Tensor:
    """KL(policy || reference) summed over real tokens, carrying the gradient of the policy."""
    if args.kl_estimator != "full":
        return masked_sum(estimate_kl(logprobs, ref_logprobs, args.kl_estimator), mask)
    input_ids, attention_mask, width = trimmed_inputs(**tokens)
    with autocast():
        ref_logits = model.score_reference(input_ids, attention_mask, completion_length=width)
    kl = full_kl(logits, ref_logits.float() / args.temperature)  # (b, T')
    return masked_sum(kl, mask)
