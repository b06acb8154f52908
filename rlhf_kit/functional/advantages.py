"""Advantages and return targets: generalized advantage estimation along the last axis.

Left out on purpose: normalisation (`masked_whiten`) and where trajectories end. The caller says that through
`continues`, because only the caller knows a fall from a timer and a real token from padding.
"""

import torch
from torch import Tensor

from rlhf_kit.functional.masked import masked_mean, masked_var


def compute_gae(
    rewards: Tensor,
    values: Tensor,
    *,
    continues: Tensor,
    bootstrap_value: Tensor,
    gamma: float,
    gae_lambda: float,
) -> tuple[Tensor, Tensor]:
    """Generalized advantage estimation; time is the last axis.

        delta_t = r_t + gamma c_t V_{t+1} - V_t
        A_t     = delta_t + gamma lambda c_t A_{t+1},        R_t = A_t + V_t

    with V_T = bootstrap_value and A_T = 0. lambda = 0 is the one-step estimate, lambda = 1 the full return minus the
    value. A step cut by a time limit first gets gamma V(final observation) added to its reward, then c_t = 0.

    Args:
        rewards: (..., T) reward of the action taken at t.
        values: (..., T) V(s_t), fixed at rollout time.
        continues: (..., T) bool or 0/1: does step t + 1 belong to the same trajectory? What stands at t + 1 is
            neither read nor mixed in where it does not, be it NaN.
        bootstrap_value: (...) V(s_T), the value after the last step; read only where continues[..., -1].
        gamma: discount in [0, 1].
        gae_lambda: in [0, 1].

    Returns:
        (advantages, returns), each (..., T), in reward units.

    Raises:
        ValueError: shapes differ, or gamma or gae_lambda outside [0, 1].

    Source: Schulman et al. 2016, eq. 16 (arXiv:1506.02438).
    """
    if not rewards.shape == values.shape == continues.shape:
        raise ValueError(
            "rewards, values and continues must have one shape (..., T), got "
            f"{tuple(rewards.shape)}, {tuple(values.shape)} and {tuple(continues.shape)}."
        )
    if bootstrap_value.shape != rewards.shape[:-1]:
        raise ValueError(
            f"bootstrap_value must have shape {tuple(rewards.shape[:-1])}, one value per trajectory row, "
            f"got {tuple(bootstrap_value.shape)}."
        )
    if not (0 <= gamma <= 1 and 0 <= gae_lambda <= 1):
        raise ValueError(f"gamma and gae_lambda must be in [0, 1], got {gamma} and {gae_lambda}.")

    same = continues.bool()
    zero = torch.zeros_like(bootstrap_value)
    next_values = torch.cat([values[..., 1:], bootstrap_value.unsqueeze(-1)], dim=-1)  # (..., T)
    deltas = rewards + gamma * torch.where(same, next_values, zero.unsqueeze(-1)) - values  # (..., T)
    advantage, backwards = zero, []
    for delta, kept in zip(reversed(deltas.unbind(-1)), reversed(same.unbind(-1)), strict=True):
        advantage = delta + gamma * gae_lambda * torch.where(kept, advantage, zero)
        backwards.append(advantage)
    advantages = torch.stack(backwards[::-1], dim=-1) if backwards else torch.empty_like(values)
    return advantages, advantages + values


def explained_variance(values: Tensor, returns: Tensor, mask: Tensor | None = None) -> Tensor:
    """Share of the variance of the returns that the critic explains: 1 - Var(R - V) / Var(R).

    Args:
        values: (...) predicted.
        returns: (...) targets.
        mask: (...) True = keep; None = keep all.

    Returns:
        () dimensionless. 1 = perfect, 0 = no better than a constant, below 0 = worse than a constant.
        0 when the returns do not vary, where the ratio has no meaning.

    Raises:
        ValueError: shapes differ.
    """
    if values.shape != returns.shape:
        raise ValueError(
            f"values and returns must have one shape, got {tuple(values.shape)} and {tuple(returns.shape)}."
        )
    if mask is None:
        mask = torch.ones_like(returns, dtype=torch.bool)
    variance = masked_var(returns, mask)
    rounding = torch.finfo(returns.dtype).eps ** 2 * masked_mean(returns.square(), mask)
    varies = variance > rounding
    unexplained = masked_var(returns - values, mask)
    ratio = unexplained / torch.where(varies, variance, torch.ones_like(variance))
    return torch.where(varies, 1 - ratio, torch.zeros_like(variance))
