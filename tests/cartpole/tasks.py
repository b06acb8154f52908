"""Tasks whose right answer is known in closed form, and which a particular mistake gets wrong."""

import gymnasium as gym
import numpy as np
from gymnasium.spaces import Box, Discrete

from cartpole_baseline.environments import AUTORESET_MODES


class Task(gym.Env):
    """A tiny task: subclasses say what is seen, earned, and how it ends."""

    num_states = 1
    action_space = Discrete(2)

    def __init__(self):
        self.observation_space = Box(-1, 1, (self.num_states,), np.float32)
        self.state = self.time = 0

    def observe(self):
        """One-hot of the state."""
        return np.eye(self.num_states, dtype=np.float32)[self.state]

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.time = 0
        self.state = int(self.np_random.integers(self.num_states))
        return self.observe(), {}

    def step(self, action):
        self.time += 1
        reward, terminated, truncated = self.act(action)
        return self.observe(), float(reward), terminated, truncated, {}


# Five probes, from the simplest thing that can go wrong to the coupling of everything.


class ConstantReward(Task):
    """One step, reward 1. V = 1. Wrong if the critic does not learn at all."""

    action_space = Discrete(1)

    def act(self, action):
        return 1, True, False


class RewardIsObservation(Task):
    """One step, reward = observation = -1 or +1. V(o) = o. Wrong if values and observations are mismatched."""

    action_space = Discrete(1)
    sign = 0

    def observe(self):
        return np.array([2 * self.state - 1], np.float32)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.state = int(self.np_random.integers(2))
        return self.observe(), {}

    def act(self, action):
        return 2 * self.state - 1, True, False


class DelayedReward(Task):
    """Two steps, reward 1 after the second. V(0) = gamma, V(1) = 1. Wrong if discounting or bootstrapping is."""

    action_space = Discrete(1)

    def observe(self):
        return np.array([self.time], np.float32)

    def act(self, action):
        return self.time == 2, self.time == 2, False


class GoodAndBadAction(Task):
    """One step, reward -1 for action 0, +1 for action 1. Wrong if the policy gradient is."""

    def act(self, action):
        return 2 * action - 1, True, False


class ActionMatchesObservation(RewardIsObservation):
    """One step, +1 if the action matches the observation, else -1. Wrong if the two are mismatched."""

    action_space = Discrete(2)

    def act(self, action):
        return (1 if action == self.state else -1), True, False


# How episodes end. The discount is 1/2, so that each mistake moves the values far.


class Timer(Task):
    """Reward 1 for ever, cut by a timer after 4 steps. V = 2: the timer is not in the observation, nor in the task."""

    def act(self, action):
        return 1, False, self.time == 4


class TwoWorlds(Task):
    """Episodes of one step in one of two worlds that pay 0 and 1 per step for ever. V = (0, 2)."""

    num_states = 2

    def act(self, action):
        return self.state, False, True


class Ring(Task):
    """Three states in a ring, reward 1 on leaving the last, cut after every step. V = (2/7, 4/7, 8/7)."""

    num_states = 3

    def act(self, action):
        reward = self.state == 2
        self.state = (self.state + 1) % 3
        return reward, False, True


class TwoFalls(Task):
    """Episodes of one step that end by themselves, reward 0 or 1. V = (0, 1): what comes next is another episode."""

    num_states = 2

    def act(self, action):
        return self.state, True, False


class FallAtTheBell(Task):
    """Falls in the very step in which the timer runs out. V = 1: terminated wins."""

    def act(self, action):
        return 1, True, True


def make_task(task, num_envs=4, mode="next_step"):
    return gym.vector.SyncVectorEnv([task] * num_envs, autoreset_mode=AUTORESET_MODES[mode])
