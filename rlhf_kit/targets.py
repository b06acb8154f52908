"""What a rollout teaches: per-token rewards, advantages and returns. Fixed before the update starts."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from rlhf_kit.config import PPOConfig
from rlhf_kit.functional import compute_gae, kl_shaped_rewards, masked_mean, masked_whiten
from rlhf_kit.rollout import Rollout


@dataclass(frozen=True)
class Targets:
    """What the update learns from; (B, T) float32, padding holds 0."""

    rewards: Tensor  # score units: KL penalty on every token, the score on the last
    advantages: Tensor  # whitened, or in score units
    returns: Tensor  # score units


def shaped_scores(rollout: Rollout, args: PPOConfig, running_std: Callable[[Tensor], float]) -> tuple[Tensor, Tensor]:
    """Scores as they enter the reward: less the missing-EOS penalty, then scaled, then clipped.

    Args:
        rollout: its raw scores are left as they are.
        args: missing_eos_penalty, scale_scores, clip_scores.
        running_std: takes these scores into the running statistics and gives the standard deviation of all so far.

    Returns:
        (scores (B,), the part of them that belongs to single tokens (B, T)), float32. That part is only scaled:
        penalty and clipping are of the completion as a whole, and so fall on the rest.
    """
    scores, token_rewards = rollout.scores, rollout.token_rewards
    if args.missing_eos_penalty is not None:
        scores = torch.where(rollout.ended, scores, scores - args.missing_eos_penalty)
    if args.scale_scores:
        std = running_std(scores)
        if std > 0:
            scores, token_rewards = scores / std, token_rewards / std
    if args.clip_scores is not None:
        scores = scores.clamp(-args.clip_scores, args.clip_scores)
    return scores, token_rewards


def compute_targets(
    rollout: Rollout, scores: Tensor, token_rewards: Tensor, args: PPOConfig, *, kl_coef: float
) -> Targets:
    """Per-token rewards, advantages and returns of a rollout.

    Args:
        rollout: of all processes, so that whitening sees every token.
        scores, token_rewards: (B,) and (B, T) from `shaped_scores`. Each token gets its own reward, the last one the
            rest of the score too.
        args: kl_placement, whiten_rewards, whiten_advantages, gamma, gae_lambda.
        kl_coef: coefficient in force for this rollout.

    Returns:
        `Targets`. The end of a completion is terminal: nothing is bootstrapped, not even where max_completion_length
        cut it.
    """
    mask = rollout.completion_mask  # (B, T)
    in_reward = kl_coef if args.kl_placement == "reward" else 0.0
    rest = scores - token_rewards.sum(-1)  # (B,)
    rewards = kl_shaped_rewards(rest, rollout.kl, mask, kl_coef=in_reward) + token_rewards  # (B, T)
    if args.whiten_rewards:
        rewards = torch.where(mask, masked_whiten(rewards, mask) + masked_mean(rewards, mask), 0)
    continues = torch.nn.functional.pad(mask[:, 1:], (0, 1))  # (B, T): step t + 1 is a real token
    advantages, returns = compute_gae(
        rewards,
        rollout.old_values,
        continues=continues,
        bootstrap_value=torch.zeros_like(scores),
        gamma=args.gamma,
        gae_lambda=args.gae_lambda,
    )
    if args.whiten_advantages:
        advantages = masked_whiten(advantages, mask)
    zero = torch.zeros_like(rewards)
    return Targets(rewards, torch.where(mask, advantages, zero), torch.where(mask, returns, zero))
