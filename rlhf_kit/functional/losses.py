"""The two clipped PPO losses and the two numbers that say how far an update moved.

Losses are element-wise and to be MINIMISED: the caller masks and reduces. Nothing here knows about batches,
processes or models.
"""

import torch
from torch import Tensor

from rlhf_kit.functional.masked import masked_mean

MAX_LOG_RATIO = 20.0  # nats; exp(20) = 4.9e8 is finite in float32 with room to be squared


def _check_same_shape(**tensors: Tensor) -> None:
    shapes = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
    if len(set(shapes.values())) > 1:
        raise ValueError(f"shapes must be equal, got {shapes}.")


def _ratio(logprobs: Tensor, old_logprobs: Tensor) -> Tensor:
    return (logprobs - old_logprobs).clamp(max=MAX_LOG_RATIO).exp()


def clipped_policy_loss(logprobs: Tensor, old_logprobs: Tensor, advantages: Tensor, *, clip_range: float) -> Tensor:
    """Per-token PPO clipped surrogate, to be minimised.

        L_t = max(-A_t r_t, -A_t clip(r_t, 1 - eps, 1 + eps)),   r_t = exp(logprobs_t - old_logprobs_t)

    Args:
        logprobs: (..., T) float32, nats, carries the gradient.
        old_logprobs: (..., T) float32, nats, fixed at rollout time.
        advantages: (..., T) float32, whitened or in reward units.
        clip_range: eps > 0, dimensionless.

    Returns:
        (..., T) loss per token; padding is not masked: reduce with `masked_mean`. Padding may hold any finite number;
        replace NaN there before the call, since a mask applied afterwards cannot keep it out of a gradient. Ratios
        above exp(20) count as exp(20), without gradient.

    Raises:
        ValueError: clip_range <= 0, or shapes differ.

    Source: Schulman et al. 2017, eq. 7 (arXiv:1707.06347).
    """
    _check_same_shape(logprobs=logprobs, old_logprobs=old_logprobs, advantages=advantages)
    if not clip_range > 0:
        raise ValueError(f"clip_range must be above 0, got {clip_range}.")
    ratio = _ratio(logprobs, old_logprobs)
    clipped = ratio.clamp(1 - clip_range, 1 + clip_range)
    return torch.maximum(-advantages * ratio, -advantages * clipped)


def clipped_value_loss(
    values: Tensor, old_values: Tensor, returns: Tensor, *, value_clip_range: float | None
) -> Tensor:
    """Per-token squared value error, to be minimised, with the factor 1/2.

        L_t = 1/2 max((V_t - R_t)^2, (clip(V_t, Vold_t - eps_v, Vold_t + eps_v) - R_t)^2)

    Args:
        values: (..., T) float32, reward units, carries the gradient.
        old_values: (..., T) float32, fixed at rollout time.
        returns: (..., T) float32, the targets.
        value_clip_range: eps_v > 0 in reward units; None = no clipping.

    Returns:
        (..., T) loss per token; padding is not masked: reduce with `masked_mean`. Padding may hold any finite number;
        replace NaN there before the call, since a mask applied afterwards cannot keep it out of a gradient.

    Raises:
        ValueError: value_clip_range <= 0, or shapes differ.

    Source: the value clipping of OpenAI Baselines PPO2 (Engstrom et al. 2020, arXiv:2005.12729, section 3).
    """
    _check_same_shape(values=values, old_values=old_values, returns=returns)
    loss = (values - returns).square()
    if value_clip_range is not None:
        if not value_clip_range > 0:
            raise ValueError(f"value_clip_range must be above 0, or None for no clipping, got {value_clip_range}.")
        clipped = old_values + (values - old_values).clamp(-value_clip_range, value_clip_range)
        loss = torch.maximum(loss, (clipped - returns).square())
    return 0.5 * loss


def clip_fraction(logprobs: Tensor, old_logprobs: Tensor, mask: Tensor, *, clip_range: float) -> Tensor:
    """Share of kept tokens whose ratio left [1 - eps, 1 + eps].

    Args:
        logprobs: (..., T) nats.
        old_logprobs: (..., T) nats.
        mask: (..., T) True = keep.
        clip_range: eps > 0.

    Returns:
        () in [0, 1].

    Raises:
        ValueError: clip_range <= 0, or shapes differ.
    """
    _check_same_shape(logprobs=logprobs, old_logprobs=old_logprobs, mask=mask)
    if not clip_range > 0:
        raise ValueError(f"clip_range must be above 0, got {clip_range}.")
    outside = (_ratio(logprobs, old_logprobs) - 1).abs() > clip_range
    return masked_mean(outside.float(), mask)


def approx_kl(logprobs: Tensor, old_logprobs: Tensor, mask: Tensor) -> Tensor:
    """Estimate of KL(old || new) from tokens sampled by the old policy: mean of (r - 1) - log r.

    Args:
        logprobs: (..., T) nats, of the policy being updated.
        old_logprobs: (..., T) nats, of the policy that sampled.
        mask: (..., T) True = keep.

    Returns:
        () nats per token, never below 0.

    Raises:
        ValueError: shapes differ.

    Source: the k3 estimator, Schulman 2020 (joschu.net/blog/kl-approx.html).
    """
    _check_same_shape(logprobs=logprobs, old_logprobs=old_logprobs, mask=mask)
    log_ratio = (logprobs - old_logprobs).clamp(max=MAX_LOG_RATIO)
    return masked_mean(torch.expm1(log_ratio) - log_ratio, mask)
