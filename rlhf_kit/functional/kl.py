"""Distance to the reference policy: sampled estimators, the exact sum, and the per-token reward built from them.

Every function here means KL(policy || reference) in nats. The sampled estimators see only the log-probability of the
token that was drawn from the policy; `full_kl` sees both distributions.
"""

import torch
from torch import Tensor

from rlhf_kit.functional.losses import MAX_LOG_RATIO, _check_same_shape


def estimate_kl(logprobs: Tensor, ref_logprobs: Tensor, estimator: str) -> Tensor:
    """Per-token estimate of KL(policy || reference) from the sampled token, with k1 = log pi - log ref.

        k1: unbiased, may be negative         k1
        k2: biased, never negative            k1^2 / 2
        k3: unbiased, never negative          exp(-k1) - 1 + k1

    Args:
        logprobs: (..., T) nats, under the policy that drew the token.
        ref_logprobs: (..., T) nats, under the reference.
        estimator: "k1", "k2" or "k3".

    Returns:
        (..., T) nats; padding is not masked.

    Raises:
        ValueError: unknown estimator, or shapes differ.

    Source: Schulman 2020 (joschu.net/blog/kl-approx.html).
    """
    _check_same_shape(logprobs=logprobs, ref_logprobs=ref_logprobs)
    k1 = logprobs - ref_logprobs
    if estimator == "k1":
        return k1
    if estimator == "k2":
        return 0.5 * k1.square()
    if estimator == "k3":
        k1 = k1.clamp(min=-MAX_LOG_RATIO)
        return torch.expm1(-k1) + k1
    raise ValueError(f'estimator must be "k1", "k2" or "k3" (for the exact sum call full_kl), got {estimator!r}.')


def full_kl(logits: Tensor, ref_logits: Tensor) -> Tensor:
    """Exact KL(policy || reference), summed over the vocabulary.

        sum_x pi(x) (log pi(x) - log ref(x))

    Args:
        logits: (..., V) of the policy, any float dtype, divided by the temperature already; carries the gradient.
        ref_logits: (..., V) of the reference, same temperature.

    Returns:
        (...) float32 (float64 for float64 logits) nats, at least 0 up to rounding. A token of probability 0 under
        the policy contributes 0.

    Raises:
        ValueError: shapes differ.
    """
    _check_same_shape(logits=logits, ref_logits=ref_logits)
    logprobs = torch.log_softmax(_at_least_float32(logits), dim=-1)  # (..., V)
    ref_logprobs = torch.log_softmax(_at_least_float32(ref_logits), dim=-1)  # (..., V)
    possible = logprobs > -torch.inf
    difference = torch.where(possible, logprobs, 0) - torch.where(possible, ref_logprobs, 0)
    return (logprobs.exp() * difference).sum(-1)


def kl_shaped_rewards(scores: Tensor, kl: Tensor, completion_mask: Tensor, *, kl_coef: float) -> Tensor:
    """Reward of each token: a KL penalty everywhere, plus the score on the last real token.

        r_t = -kl_coef k_t + [t is the last real token] score

    Args:
        scores: (B,) what the reward function said of each completion.
        kl: (B, T) nats per token; may hold anything in padding.
        completion_mask: (B, T) True = real token, a run of True from t = 0.
        kl_coef: beta >= 0, reward per nat.

    Returns:
        (B, T) in score units, 0 in padding. A row without a real token is all 0: nothing was done to earn a score.

    Raises:
        ValueError: shapes do not fit, or kl_coef < 0.

    Source: Ziegler et al. 2019, section 2 (arXiv:1909.08593).
    """
    _check_same_shape(kl=kl, completion_mask=completion_mask)
    if kl.ndim != 2:
        raise ValueError(f"kl must have shape (B, T), one row per completion, got {tuple(kl.shape)}.")
    if scores.shape != kl.shape[:1]:
        raise ValueError(
            f"scores must have shape {tuple(kl.shape[:1])}, one per completion, got {tuple(scores.shape)}."
        )
    if not kl_coef >= 0:
        raise ValueError(f"kl_coef must be at least 0, got {kl_coef}.")
    kl = kl.to(torch.promote_types(kl.dtype, scores.dtype))
    mask = completion_mask.bool()
    is_last = mask & (mask.cumsum(-1) == mask.sum(-1, keepdim=True))  # (B, T)
    penalty = torch.where(mask, -kl_coef * torch.where(mask, kl, 0), 0)  # (B, T)
    return penalty + torch.where(is_last, scores[:, None].to(kl.dtype), 0)


def _at_least_float32(x: Tensor) -> Tensor:
    return x if x.dtype == torch.float64 else x.float()
