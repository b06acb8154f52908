"""PPO on discrete actions, top to bottom: networks, sampling, a rollout, advantages, the update, the loop.

Every formula comes from `rlhf_kit.functional`, where the language-model trainer gets it too. Left out on purpose:
making environments, evaluation and files (see the other modules), and devices: networks this small are fastest on one
CPU thread.
"""

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import islice
from typing import NamedTuple

import numpy as np
import torch
from gymnasium.vector import AutoresetMode, VectorEnv
from torch import Tensor, nn

from cartpole_baseline.config import PPOConfig
from rlhf_kit.functional import (
    approx_kl,
    clip_fraction,
    clipped_policy_loss,
    clipped_value_loss,
    compute_gae,
    entropy_from_logits,
    explained_variance,
    masked_whiten,
    token_logprobs,
)


def mlp(
    num_inputs: int, num_outputs: int, *, hidden_size: int, gain: float, generator: torch.Generator
) -> nn.Sequential:
    """Two tanh layers and a linear one; orthogonal weights (`gain` scales the last layer), zero biases."""
    layers: list[nn.Module] = []
    sizes = [(num_inputs, hidden_size, math.sqrt(2)), (hidden_size, hidden_size, math.sqrt(2))]
    for rows, columns, scale in [*sizes, (hidden_size, num_outputs, gain)]:
        linear = nn.Linear(rows, columns)
        nn.init.orthogonal_(linear.weight, scale, generator=generator)
        nn.init.zeros_(linear.bias)
        layers += [linear, nn.Tanh()]
    return nn.Sequential(*layers[:-1])


def make_actor(envs: VectorEnv, hidden_size: int, generator: torch.Generator) -> nn.Sequential:
    """Observations (..., D) -> logits (..., A), nearly equal for all actions at the start."""
    num_inputs, num_actions = envs.single_observation_space.shape[0], int(envs.single_action_space.n)
    return mlp(num_inputs, num_actions, hidden_size=hidden_size, gain=0.01, generator=generator)


class Step(NamedTuple):
    """One step of all N environments."""

    observations: np.ndarray  # (N, D) float32, what the action was chosen on
    actions: np.ndarray  # (N,) int64
    rewards: np.ndarray  # (N,) float32
    terminated: np.ndarray  # (N,) bool, the task itself ended: nothing comes after
    truncated: np.ndarray  # (N,) bool, the timer cut: there would have been more
    final_observations: np.ndarray  # (N, D) float32, what the action led to, before any reset
    real: np.ndarray  # (N,) bool, False where the environment ignored the action and only reset itself


def sample(logits: Tensor, generator: torch.Generator) -> Tensor:
    """(N, A) -> (N,) actions drawn from softmax(logits), by the Gumbel-max trick."""
    return (logits - torch.empty_like(logits).exponential_(generator=generator).log()).argmax(-1)


def play(envs: VectorEnv, actor: nn.Module, generator: torch.Generator, *, seed: int | None) -> Iterator[Step]:
    """Step all environments for ever with sampled actions, whatever their autoreset mode.

    NEXT_STEP: the step after an end ignores its action and returns the reset observation with reward 0: not `real`.
    SAME_STEP: the step that ends returns the reset observation, and the final one in `infos`.

    Raises:
        ValueError: the environments do not reset themselves.
    """
    mode = envs.metadata.get("autoreset_mode")
    if mode not in (AutoresetMode.NEXT_STEP, AutoresetMode.SAME_STEP):
        raise ValueError(f"environments must reset themselves (autoreset NEXT_STEP or SAME_STEP), these have {mode}.")
    next_step = mode == AutoresetMode.NEXT_STEP
    reset = envs.reset(seed=seed)[0]
    observations = np.array(reset, dtype=np.float32)  # a copy: environments may reuse their arrays
    real = np.ones(envs.num_envs, dtype=bool)
    while True:
        with torch.no_grad():
            actions = sample(actor(torch.from_numpy(observations)), generator).numpy()
        following, rewards, terminated, truncated, infos = envs.step(actions)
        following, terminated, truncated = np.array(following, dtype=np.float32), terminated.copy(), truncated.copy()
        ended = terminated | truncated
        final = following
        if not next_step and ended.any():
            final = following.copy()
            final[ended] = np.stack(infos["final_obs"][ended])
        yield Step(observations, actions, rewards.astype(np.float32), terminated, truncated, final, real)
        observations = following
        real = ~ended if next_step else real


def stack(steps: Iterable[Step]) -> Step:
    """T steps as one, each field a tensor with time as its second axis: (N, T) or (N, T, D)."""
    return Step(*(torch.from_numpy(np.stack(column, axis=1)) for column in zip(*steps, strict=True)))


@dataclass(frozen=True)
class Rollout:
    """T steps of N environments, fixed while the networks learn from them. Time is the last axis."""

    observations: Tensor  # (N, T, D)
    actions: Tensor  # (N, T) int64
    rewards: Tensor  # (N, T)
    terminated: Tensor  # (N, T) bool
    truncated: Tensor  # (N, T) bool
    final_observations: Tensor  # (N, T, D) what each action led to, before any reset
    real: Tensor  # (N, T) bool, False = reset rows, which enter nothing
    old_logprobs: Tensor  # (N, T) of the actions, nats
    old_values: Tensor  # (N, T) V(observation)
    final_values: Tensor  # (N, T) V(final_observation)


class Batch(NamedTuple):
    """The R real rows of a rollout, in any order."""

    observations: Tensor  # (R, D)
    actions: Tensor  # (R,)
    old_logprobs: Tensor  # (R,)
    old_values: Tensor  # (R,)
    advantages: Tensor  # (R,) whitened if so set
    returns: Tensor  # (R,) targets of the critic


def advantages_and_returns(rollout: Rollout, *, gamma: float, gae_lambda: float) -> tuple[Tensor, Tensor]:
    """GAE where a fall and the timer are different things.

    Bootstrap unless terminated: a step cut by the timer gets the value of the observation it led to, because the task
    would have gone on. Cut the recursion at either: credit never crosses into the next episode. With both flags set,
    terminated wins.

    Returns:
        (advantages, returns), each (N, T); rows that are not `real` hold numbers without meaning.
    """
    cut_by_timer = rollout.truncated & ~rollout.terminated
    return compute_gae(
        rollout.rewards + gamma * torch.where(cut_by_timer, rollout.final_values, 0),
        rollout.old_values,
        continues=~(rollout.terminated | rollout.truncated),
        bootstrap_value=rollout.final_values[:, -1],
        gamma=gamma,
        gae_lambda=gae_lambda,
    )


class EpisodeReturns:
    """Sum of rewards of every episode, also of those that span rollouts."""

    def __init__(self, num_envs: int):
        self.running = np.zeros(num_envs)

    def add(self, rewards: Tensor, ended: Tensor) -> dict[str, float]:
        """Take in (N, T) rewards and ends; how many episodes ended, and, if any did, their mean return."""
        finished: list[float] = []
        for reward, end in zip(rewards.numpy().T, ended.numpy().T, strict=True):
            self.running += reward
            finished += self.running[end].tolist()
            self.running[end] = 0
        return {"episodes": len(finished)} | ({"episode_return": float(np.mean(finished))} if finished else {})


class PPO:
    """Actor and critic on one vectorised task.

    Args:
        envs: flat observations (N, D), discrete actions from 0, autoreset NEXT_STEP or SAME_STEP (`make_envs`).
        config: settings.

    Attributes:
        actor: (..., D) -> (..., A) logits.
        critic: (..., D) -> (..., 1) value.

    Raises:
        ValueError: batch sizes that make no sense together.
    """

    def __init__(self, envs: VectorEnv, config: PPOConfig):
        self.envs, self.config = envs, config
        self.num_updates = config.num_updates(envs.num_envs)
        self.generator = torch.Generator().manual_seed(config.seed)  # the only source of chance besides the task
        num_inputs, width = envs.single_observation_space.shape[0], config.hidden_size
        self.actor = make_actor(envs, width, self.generator)
        self.critic = mlp(num_inputs, 1, hidden_size=width, gain=1.0, generator=self.generator)
        self.parameters = [list(self.actor.parameters()), list(self.critic.parameters())]
        self.learning_rates = [config.learning_rate, config.value_learning_rate]
        groups = [{"params": p, "lr": lr} for p, lr in zip(self.parameters, self.learning_rates, strict=True)]
        self.optimizer = torch.optim.Adam(groups, eps=config.adam_epsilon, fused=True)

    def train(self) -> Iterator[dict[str, float]]:
        """Collect, then learn, until the steps are used up. Yields the numbers of each update (docs/cartpole.md)."""
        steps = play(self.envs, self.actor, self.generator, seed=self.config.seed)
        episodes = EpisodeReturns(self.envs.num_envs)
        for update in range(self.num_updates):
            learning_rate, value_learning_rate = self.anneal(update)
            rollout = self.collect(steps)
            metrics = self.learn(rollout)
            yield {
                "step": (update + 1) * rollout.real.numel(),
                **episodes.add(rollout.rewards, rollout.terminated | rollout.truncated),
                "learning_rate": learning_rate,
                "value_learning_rate": value_learning_rate,
                **metrics,
            }

    def anneal(self, update: int) -> list[float]:
        """Linear: the first update has the full learning rates, the last exactly `final_lr_fraction` of them."""
        done = update / max(self.num_updates - 1, 1)
        rates = [lr * ((1 - done) + done * self.config.final_lr_fraction) for lr in self.learning_rates]
        for group, rate in zip(self.optimizer.param_groups, rates, strict=True):
            group["lr"] = rate
        return rates

    @torch.no_grad()
    def collect(self, steps: Iterator[Step]) -> Rollout:
        """The next T steps. The networks do not change meanwhile, so one pass at the end scores all of them."""
        played = stack(islice(steps, self.config.num_steps))
        return Rollout(
            *played,
            old_logprobs=token_logprobs(self.actor(played.observations), played.actions),
            old_values=self.critic(played.observations).squeeze(-1),
            final_values=self.critic(played.final_observations).squeeze(-1),
        )

    def learn(self, rollout: Rollout) -> dict[str, float]:
        """Epochs of shuffled mini-batches over one rollout, every real row once per epoch."""
        config = self.config
        advantages, returns = advantages_and_returns(rollout, gamma=config.gamma, gae_lambda=config.gae_lambda)
        metrics = {"explained_variance": float(explained_variance(rollout.old_values, returns, rollout.real))}
        if config.whiten_advantages:
            advantages = masked_whiten(advantages, rollout.real)
        fixed = (rollout.observations, rollout.actions, rollout.old_logprobs, rollout.old_values, advantages, returns)
        batch = Batch(*(tensor[rollout.real] for tensor in fixed))
        losses: list[Tensor] = []
        for _ in range(config.ppo_epochs):
            order = torch.randperm(len(batch.actions), generator=self.generator)
            shuffled = (tensor[order].tensor_split(config.num_mini_batches) for tensor in batch)
            losses += [self.step(Batch(*mini_batch)) for mini_batch in zip(*shuffled, strict=True)]
            moved = self.distance(batch)
            if config.max_approx_kl is not None and moved["approx_kl"] > config.max_approx_kl:
                break
        names = ("policy_loss", "value_loss", "entropy", "grad_norm", "value_grad_norm")
        means = torch.stack(losses).mean(0).tolist()
        return metrics | dict(zip(names, means, strict=True)) | moved | {"optimizer_steps": len(losses)}

    def step(self, batch: Batch) -> Tensor:
        """One optimizer step on one mini-batch; (5,) losses, entropy, gradient norms before clipping."""
        config = self.config
        logits = self.actor(batch.observations)  # (R, A)
        logprobs = token_logprobs(logits, batch.actions)  # (R,)
        values = self.critic(batch.observations).squeeze(-1)  # (R,)
        policy_loss = clipped_policy_loss(
            logprobs, batch.old_logprobs, batch.advantages, clip_range=config.clip_range
        ).mean()
        value_loss = clipped_value_loss(
            values, batch.old_values, batch.returns, value_clip_range=config.value_clip_range
        ).mean()
        entropy = entropy_from_logits(logits).mean()
        loss = policy_loss + config.value_coef * value_loss - config.entropy_coef * entropy
        self.optimizer.zero_grad()
        loss.backward()
        norms = torch.stack([nn.utils.clip_grad_norm_(p, config.max_grad_norm) for p in self.parameters])
        if not norms.isfinite().all():
            raise FloatingPointError(
                f"gradient norms of actor and critic are {norms.tolist()}: lower the learning rates, or scale rewards."
            )
        self.optimizer.step()
        return torch.stack([policy_loss.detach(), value_loss.detach(), entropy.detach(), *norms])

    @torch.no_grad()
    def distance(self, batch: Batch) -> dict[str, float]:
        """How far the policy is now from the one that sampled, over the whole rollout."""
        logprobs = token_logprobs(self.actor(batch.observations), batch.actions)
        every = torch.ones_like(logprobs, dtype=torch.bool)
        clipped = clip_fraction(logprobs, batch.old_logprobs, every, clip_range=self.config.clip_range)
        return {"approx_kl": float(approx_kl(logprobs, batch.old_logprobs, every)), "clip_fraction": float(clipped)}
