"""How strongly the policy is held to the reference: a fixed coefficient, or one that follows a target."""

import math


def adapted_kl_coef(kl_coef: float, *, kl: float, target_kl: float, horizon: float, num_completions: int) -> float:
    """The next KL coefficient of the adaptive controller.

        coef <- coef (1 + clip(KL / target - 1, -0.2, 0.2) n / horizon)

    Args:
        kl_coef: current coefficient, >= 0.
        kl: mean KL(policy || reference) per completion in this rollout, nats.
        target_kl: the KL to hold, nats per completion, > 0.
        horizon: completions over which the coefficient can change by about 20 %.
        num_completions: n, completions in this rollout.

    Returns:
        The new coefficient, never below 0; the old one if `kl` is not finite.

    Source: Ziegler et al. 2019, section 2.2 (arXiv:1909.08593).
    """
    if not math.isfinite(kl):
        return kl_coef
    error = min(max(kl / target_kl - 1, -0.2), 0.2)
    return max(kl_coef * (1 + error * num_completions / horizon), 0.0)
