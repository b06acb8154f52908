"""REINFORCE: what PPO grew out of, for comparison. Every action is weighted by the return that followed it.

No critic, so no estimate cuts the noise and none can stand in for what a timer cut off; no old policy, so every batch
is used for one step and thrown away, and nothing bounds that step.
"""

from collections.abc import Iterator

import numpy as np
import torch
from gymnasium.vector import VectorEnv
from torch import nn

from cartpole_baseline.config import ReinforceConfig
from cartpole_baseline.ppo import Step, make_actor, play, stack
from rlhf_kit.functional import (
    compute_gae,
    entropy_from_logits,
    masked_mean,
    masked_sum,
    masked_whiten,
    token_logprobs,
)


class Reinforce:
    """A policy on one vectorised task, improved by one optimizer step per batch of whole episodes.

    Args:
        envs: as for `PPO`; one episode of each makes a batch.
        config: settings.

    Attributes:
        actor: (..., D) -> (..., A) logits.
    """

    def __init__(self, envs: VectorEnv, config: ReinforceConfig):
        self.envs, self.config = envs, config
        self.generator = torch.Generator().manual_seed(config.seed)
        self.actor = make_actor(envs, config.hidden_size, self.generator)
        self.optimizer = torch.optim.Adam(
            self.actor.parameters(), lr=config.learning_rate, eps=config.adam_epsilon, fused=True
        )

    def train(self) -> Iterator[dict[str, float]]:
        """One update per batch until the steps are used up; the last batch is played to its end."""
        steps, seed = 0, self.config.seed
        while steps < self.config.total_steps:
            episodes, playing = self.collect(seed)
            seed = None  # later batches go on with the environments' own random numbers
            steps += int(playing.sum())
            metrics = self.learn(episodes, playing)
            returns = masked_sum(episodes.rewards, playing, dim=-1)
            yield {"step": steps, "episodes": len(returns), "episode_return": float(returns.mean()), **metrics}

    def collect(self, seed: int | None) -> tuple[Step, torch.Tensor]:
        """One whole episode of every environment, each field (N, T), and (N, T) True up to the end of its episode."""
        steps, masks, playing = [], [], np.ones(self.envs.num_envs, dtype=bool)
        for step in play(self.envs, self.actor, self.generator, seed=seed):
            steps.append(step)
            masks.append(playing)
            playing = playing & ~(step.terminated | step.truncated)
            if not playing.any():
                break
        return stack(steps), torch.from_numpy(np.stack(masks, axis=1))

    def learn(self, episodes: Step, playing: torch.Tensor) -> dict[str, float]:
        """Raise the log-probability of each action by the discounted return that followed it."""
        config = self.config
        nothing = torch.zeros_like(episodes.rewards)
        returns, _ = compute_gae(  # without a critic and with lambda 1, the advantage is the return
            episodes.rewards,
            nothing,
            continues=~(episodes.terminated | episodes.truncated),
            bootstrap_value=nothing[:, 0],
            gamma=config.gamma,
            gae_lambda=1.0,
        )
        weights = masked_whiten(returns, playing) if config.whiten_advantages else returns
        logits = self.actor(episodes.observations)  # (N, T, A)
        logprobs = token_logprobs(logits, episodes.actions)  # (N, T)
        policy_loss = masked_mean(-weights * logprobs, playing)
        entropy = masked_mean(entropy_from_logits(logits), playing)
        self.optimizer.zero_grad()
        (policy_loss - config.entropy_coef * entropy).backward()
        grad_norm = nn.utils.clip_grad_norm_(self.actor.parameters(), config.max_grad_norm)
        if not torch.isfinite(grad_norm):
            raise FloatingPointError(f"the gradient is {grad_norm}: lower learning_rate, or scale the task's rewards.")
        self.optimizer.step()
        numbers = {"policy_loss": policy_loss, "entropy": entropy, "grad_norm": grad_norm}
        return {name: number.item() for name, number in numbers.items()}
