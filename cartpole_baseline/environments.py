"""Vectorised gymnasium tasks in the one form that the algorithms take: flat observations, discrete actions from 0."""

import os

import gymnasium as gym
import numpy as np
import torch
from gymnasium.spaces import Box, Discrete
from gymnasium.vector import AutoresetMode, VectorEnv
from gymnasium.wrappers import FlattenObservation, TransformAction
from torch import nn

from cartpole_baseline.ppo import sample

AUTORESET_MODES = {"next_step": AutoresetMode.NEXT_STEP, "same_step": AutoresetMode.SAME_STEP}
MAX_EVALUATION_STEPS = 10_000  # of one episode; most tasks end theirs long before


def make_env(env_id: str, *, max_episode_steps: int | None = None, render_mode: str | None = None) -> gym.Env:
    """One environment, wrapped if need be so that its observations are flat and its actions start at 0.

    Args:
        env_id: of a registered task; "module:Name-v0" imports the module first.
        max_episode_steps: the timer; None = the task's own.
        render_mode: "rgb_array" for pictures.

    Raises:
        ValueError: unknown task, missing package, continuous actions, or observations that cannot be made flat.
    """
    rendering = {} if render_mode is None else {"render_mode": render_mode}  # not every task takes the argument
    os.environ.setdefault("SDL_VIDEODRIVER", "dummy")  # pictures need no screen, and pygame would look for one
    try:
        env = gym.make(env_id, max_episode_steps=max_episode_steps, **rendering)
    except (gym.error.Error, ImportError) as error:
        raise ValueError(f"cannot make the task {env_id!r}: {error}") from error
    if not isinstance(env.action_space, Discrete):
        raise ValueError(f"the task {env_id} has actions {env.action_space}; only discrete actions are supported.")
    space = env.observation_space
    if not (isinstance(space, Box) and len(space.shape) == 1):
        if not space.is_np_flattenable:
            raise ValueError(f"the task {env_id} has observations {space}, which cannot be flattened to numbers.")
        env = FlattenObservation(env)
    if (start := int(env.action_space.start)) != 0:
        env = TransformAction(env, lambda action: action + start, Discrete(env.action_space.n))
    return env


def make_envs(
    env_id: str, num_envs: int, *, autoreset_mode: str = "next_step", max_episode_steps: int | None = None
) -> VectorEnv:
    """Many environments of one task, stepped together: the task's own vectorised version where there is one.

    Args:
        env_id: as in `make_env`.
        num_envs: at least 1.
        autoreset_mode: "next_step" or "same_step". gymnasium's vectorised CartPole knows only the first; the second
            steps environments one by one, which is slower.
        max_episode_steps: the timer; None = the task's own.

    Raises:
        ValueError: as in `make_env`, an unknown mode, or a count below 1.
    """
    if autoreset_mode not in AUTORESET_MODES:
        raise ValueError(f"autoreset_mode must be one of {sorted(AUTORESET_MODES)}, got {autoreset_mode!r}.")
    for name, count in [("num_envs", num_envs), ("max_episode_steps", max_episode_steps)]:
        if count is not None and count < 1:
            raise ValueError(f"{name} must be at least 1, got {count}.")
    first = make_env(env_id, max_episode_steps=max_episode_steps)
    plain = first.observation_space == first.unwrapped.observation_space
    if plain and first.spec.vector_entry_point is not None and autoreset_mode == "next_step":
        first.close()
        timer = {} if max_episode_steps is None else {"max_episode_steps": max_episode_steps}
        return gym.make_vec(env_id, num_envs=num_envs, vectorization_mode="vector_entry_point", **timer)
    rest = [lambda: make_env(env_id, max_episode_steps=max_episode_steps)] * (num_envs - 1)
    return gym.vector.SyncVectorEnv([lambda: first, *rest], autoreset_mode=AUTORESET_MODES[autoreset_mode])


@torch.no_grad()
def evaluate(envs: VectorEnv, actor: nn.Module, *, greedy: bool, seed: int) -> np.ndarray:
    """Play one fresh episode in every environment.

    One each, because the first hundred to end among many would be the short ones.

    Args:
        envs: as many as episodes are wanted; they are reset.
        actor: (..., D) -> (..., A) logits.
        greedy: most probable action; False samples.
        seed: of the episodes and of the sampling.

    Returns:
        (N,) sum of rewards of each episode, undiscounted.

    Raises:
        ValueError: an episode goes on after 10,000 steps.
    """
    generator = torch.Generator().manual_seed(seed)
    returns, playing = np.zeros(envs.num_envs), np.ones(envs.num_envs, dtype=bool)
    observations = envs.reset(seed=seed)[0]
    for _ in range(MAX_EVALUATION_STEPS):
        logits = actor(torch.from_numpy(np.array(observations, dtype=np.float32)))
        actions = logits.argmax(-1) if greedy else sample(logits, generator)
        observations, rewards, terminated, truncated, _ = envs.step(actions.numpy())
        returns += np.where(playing, rewards, 0)
        playing &= ~(terminated | truncated)
        if not playing.any():
            return returns
    raise ValueError(
        f"{playing.sum()} of {envs.num_envs} episodes go on after {MAX_EVALUATION_STEPS} steps: this task has no "
        "timer of its own; set max_episode_steps."
    )
