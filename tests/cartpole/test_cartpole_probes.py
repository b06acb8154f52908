"""What PPO must learn on tasks whose values and best actions are known, each with its own class of mistakes."""

import dataclasses

import pytest
import tasks
import torch

from cartpole_baseline.config import PPOConfig
from cartpole_baseline.ppo import PPO

pytestmark = pytest.mark.usefixtures("one_thread")

SEEDS = [0, *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(1, 3))]
MODES = ["next_step", "same_step"]


def learn(task, *, total_steps, seed=0, mode="next_step", **settings):
    """Train with the settings all probes share: 4 environments x 128 steps, 4 mini-batches, 4 epochs, lr 1e-3."""
    settings = {
        "num_steps": 128, "num_mini_batches": 4, "ppo_epochs": 4, "learning_rate": 1e-3, "value_learning_rate": 1e-3,
        "final_lr_fraction": 0.1,
        "gamma": 0.99, "gae_lambda": 0.95, "entropy_coef": 0.01,
    } | settings  # fmt: skip
    algorithm = PPO(tasks.make_task(task, mode=mode), PPOConfig(total_steps=total_steps, seed=seed, **settings))
    for _ in algorithm.train():
        pass
    return algorithm


def values(algorithm, observations):
    with torch.no_grad():
        return algorithm.critic(torch.tensor(observations)).squeeze(-1)


def probabilities(algorithm, observations):
    with torch.no_grad():
        return algorithm.actor(torch.tensor(observations)).softmax(-1)


def assert_near(found, expected, atol):
    torch.testing.assert_close(found, torch.tensor(expected), atol=atol, rtol=0)


VALUE_PROBES = [
    (tasks.ConstantReward, 7_500, [[1.0]], [1.0]),
    (tasks.RewardIsObservation, 7_500, [[-1.0], [1.0]], [-1.0, 1.0]),
    (tasks.DelayedReward, 12_500, [[0.0], [1.0]], [0.99, 1.0]),
]


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize(("task", "total_steps", "observations", "expected"), VALUE_PROBES)
def test_values(task, total_steps, observations, expected, seed, mode):
    algorithm = learn(task, total_steps=total_steps, seed=seed, mode=mode)
    assert_near(values(algorithm, observations), expected, atol=5e-3)


POLICY_PROBES = [
    (tasks.GoodAndBadAction, 20_000, [[1.0]], [[0.0, 1.0]]),
    (tasks.ActionMatchesObservation, 20_000, [[-1.0], [1.0]], [[1.0, 0.0], [0.0, 1.0]]),
]


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize(("task", "total_steps", "observations", "expected"), POLICY_PROBES)
def test_policies(task, total_steps, observations, expected, seed, mode):
    algorithm = learn(task, total_steps=total_steps, seed=seed, mode=mode)
    assert_near(probabilities(algorithm, observations), expected, atol=1e-2)
    assert_near(values(algorithm, observations), [1.0] * len(observations), atol=5e-3)


# How episodes end

ENDINGS = [
    (tasks.Timer, [2.0]),
    (tasks.TwoWorlds, [0.0, 2.0]),
    (tasks.Ring, [2 / 7, 4 / 7, 8 / 7]),
    (tasks.TwoFalls, [0.0, 1.0]),
    (tasks.FallAtTheBell, [1.0]),
]


def values_of_states(task, **settings):
    return values(learn(task, total_steps=12_500, gamma=0.5, **settings), torch.eye(task.num_states).tolist())


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize(("task", "expected"), ENDINGS)
def test_a_fall_ends_a_trajectory_and_a_timer_only_cuts_it(task, expected, seed, mode):
    assert_near(values_of_states(task, seed=seed, mode=mode), expected, atol=5e-3)


def timer_as_fall(rollout):
    return dataclasses.replace(rollout, terminated=rollout.terminated | rollout.truncated)


def bootstrap_from_the_reset_observation(rollout):
    """V of the first observation of the next episode: one row on, or two where the first is a reset."""
    rows = 1 if rollout.real.all() else 2
    return dataclasses.replace(rollout, final_values=rollout.old_values.roll(-rows, dims=-1))


def credit_across_episodes(rollout):
    nothing = torch.zeros_like(rollout.terminated)
    return dataclasses.replace(rollout, terminated=nothing, truncated=nothing)


def learn_from_reset_rows(rollout):
    return dataclasses.replace(rollout, real=torch.ones_like(rollout.real))


def bootstrap_at_both_flags(rollout):
    return dataclasses.replace(rollout, terminated=rollout.terminated & ~rollout.truncated)


MISTAKES = [
    (timer_as_fall, tasks.Timer, MODES),
    (timer_as_fall, tasks.TwoWorlds, MODES),
    (timer_as_fall, tasks.Ring, MODES),
    (bootstrap_from_the_reset_observation, tasks.TwoWorlds, MODES),
    (bootstrap_from_the_reset_observation, tasks.Ring, MODES),
    (credit_across_episodes, tasks.TwoWorlds, MODES),
    (credit_across_episodes, tasks.TwoFalls, MODES),
    (learn_from_reset_rows, tasks.TwoWorlds, ["next_step"]),
    (learn_from_reset_rows, tasks.TwoFalls, ["next_step"]),
    (bootstrap_at_both_flags, tasks.FallAtTheBell, MODES),
]


@pytest.mark.parametrize(
    ("mistake", "task", "mode"), [(mistake, task, mode) for mistake, task, modes in MISTAKES for mode in modes]
)
def test_each_mistake_moves_the_values_far(mistake, task, mode, monkeypatch):
    # The tests above can fail: each mistake, made on purpose, is off by at least ten times their tolerance.
    collect = PPO.collect
    monkeypatch.setattr(PPO, "collect", lambda self, steps: mistake(collect(self, steps)))
    expected = torch.tensor(dict(ENDINGS)[task])
    assert (values_of_states(task, mode=mode) - expected).abs().max() > 0.05
