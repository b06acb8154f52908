"""Statistics of a rollout. Padding never enters them, and they are Python floats. docs/metrics.md defines each."""

from typing import Any

from torch import Tensor

from rlhf_kit.functional import explained_variance, masked_mean, masked_sum, masked_var
from rlhf_kit.rollout import Rollout
from rlhf_kit.targets import Targets

OTHER_PROMPTS = "eval_other_prompts"  # marks an evaluation on prompts that are not the run's own


def rollout_metrics(rollout: Rollout) -> dict[str, float]:
    """What the policy did and how far from the reference it is; the same for training and evaluation.

    Args:
        rollout: of all processes.
    """
    mask, scores = rollout.completion_mask, rollout.scores
    lengths = mask.sum(-1).float()  # (B,)
    metrics = {
        "score": scores.mean(),
        "score_std": scores.std(correction=0),
        "score_min": scores.min(),
        "score_max": scores.max(),
        "ref_kl": masked_mean(rollout.ref_kl, mask),
        "ref_kl_per_completion": masked_sum(rollout.ref_kl, mask, dim=-1).mean(),
        "entropy": masked_mean(rollout.entropy, mask),
        "completion_length": lengths.mean(),
        "completion_length_max": lengths.max(),
        "eos_rate": rollout.ended.float().mean(),
    }
    for name, rewards in rollout.rewards_by_function.items():
        given = ~rewards.isnan()  # (B,)
        if given.any():
            metrics[f"reward/{name}"] = masked_mean(rewards, given)
            metrics[f"reward/{name}_std"] = masked_var(rewards, given).sqrt()
    for name, values in rollout.logged_metrics.items():
        metrics[f"logged/{name}"] = masked_mean(values, ~values.isnan())
    return {name: float(value) for name, value in metrics.items()}


def target_metrics(rollout: Rollout, targets: Targets) -> dict[str, float]:
    """What the update is told to do, and how well the critic foresaw it.

    Args:
        rollout: of all processes.
        targets: computed from it.
    """
    mask = rollout.completion_mask
    metrics = {
        "reward_per_completion": masked_sum(targets.rewards, mask, dim=-1).mean(),
        "kl_estimate": masked_mean(rollout.kl, mask),
        "value": masked_mean(rollout.old_values, mask),
        "return": masked_mean(targets.returns, mask),
        "explained_variance": explained_variance(rollout.old_values, targets.returns, mask),
    }
    return {name: float(value) for name, value in metrics.items()}


def completion_rows(rollout: Rollout, count: int, **labels: Any) -> list[dict[str, Any]]:
    """The first completions as table rows: text, raw score, what each reward function said, distance to the reference.

    Args:
        rollout: of all processes.
        count: rows at most.
        labels: further entries of every row, e.g. iteration.
    """
    ref_kl = masked_mean(rollout.ref_kl, rollout.completion_mask, dim=-1)  # (B,)
    return [
        {
            **labels,
            "prompt": rollout.prompts[i],
            "completion": rollout.completions[i],
            "score": float(rollout.scores[i]),
            "ref_kl": float(ref_kl[i]),
            "length": int(rollout.completion_mask[i].sum()),
            "ended": bool(rollout.ended[i]),
            **{f"reward/{name}": _or_none(rewards[i]) for name, rewards in rollout.rewards_by_function.items()},
            **{f"logged/{name}": values[i] for name, values in rollout.logged_columns.items()},
        }
        for i in range(min(count, len(rollout)))
    ]


def _or_none(reward: Tensor) -> float | None:
    """A reward as a function gave it."""
    return None if reward.isnan() else float(reward)
