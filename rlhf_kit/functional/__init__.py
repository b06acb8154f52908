"""The maths of PPO as pure functions on tensors: torch only, no models, no state.

The language-model trainer and the CartPole baseline call these same functions, and so can you.
"""

from rlhf_kit.functional.advantages import compute_gae, explained_variance
from rlhf_kit.functional.kl import estimate_kl, full_kl, kl_shaped_rewards
from rlhf_kit.functional.logprobs import entropy_from_logits, token_logprobs
from rlhf_kit.functional.losses import approx_kl, clip_fraction, clipped_policy_loss, clipped_value_loss
from rlhf_kit.functional.masked import masked_mean, masked_sum, masked_var, masked_whiten

__all__ = [
    "approx_kl",
    "clip_fraction",
    "clipped_policy_loss",
    "clipped_value_loss",
    "compute_gae",
    "entropy_from_logits",
    "estimate_kl",
    "explained_variance",
    "full_kl",
    "kl_shaped_rewards",
    "masked_mean",
    "masked_sum",
    "masked_var",
    "masked_whiten",
    "token_logprobs",
]
