"""REINFORCE: whole episodes, returns to go, one step per batch."""

import dataclasses

import gymnasium as gym
import pytest
import tasks
import torch
from test_cartpole_ppo import Script
from torch.testing import assert_close

from cartpole_baseline.config import ReinforceConfig
from cartpole_baseline.environments import AUTORESET_MODES, make_envs
from cartpole_baseline.reinforce import Reinforce

pytestmark = pytest.mark.usefixtures("one_thread")


def make_reinforce(envs=None, **settings):
    defaults = {"total_steps": 200, "hidden_size": 8}
    return Reinforce(envs or make_envs("CartPole-v1", 3), ReinforceConfig(**(defaults | settings)))


@pytest.mark.parametrize("mode", sorted(AUTORESET_MODES))
def test_a_batch_is_one_whole_episode_of_each_environment(mode):
    # kills: episodes cut at the shortest one; steps after an end counted in
    envs = gym.vector.SyncVectorEnv(
        [lambda: Script([(2, True, False), (9, True, False)]), lambda: Script([(5, False, True), (9, True, False)])],
        autoreset_mode=AUTORESET_MODES[mode],
    )
    algorithm = make_reinforce(envs)
    for episode in (1, 2):
        batch, playing = algorithm.collect(seed=None)
        lengths = [2, 5] if episode == 1 else [9, 9]
        if episode == 1:
            assert playing.tolist() == [[True, True, False, False, False], [True] * 5]
            assert batch.rewards[playing].tolist() == [101, 102, 101, 102, 103, 104, 105]
            envs.set_attr("episode", 1)  # under autoreset the first environment went on meanwhile
        assert playing.sum(1).tolist() == lengths


@pytest.mark.parametrize("whiten", [False, True])
@pytest.mark.parametrize("mode", sorted(AUTORESET_MODES))
def test_weights_are_discounted_returns_to_go(mode, whiten):
    # kills: whole-episode return for every step, returns across an end, no discount, wrong sign, whitening over the
    # steps after an end
    settings = {"entropy_coef": 0.5, "gamma": 0.9, "max_grad_norm": float("inf"), "whiten_advantages": whiten}
    algorithm = make_reinforce(make_envs("CartPole-v1", 3, autoreset_mode=mode), **settings)
    batch, playing = algorithm.collect(seed=0)
    lengths = playing.sum(1).tolist()
    assert len(set(lengths)) > 1  # else nothing comes after an end
    where = [(env, t) for env, length in enumerate(lengths) for t in range(length)]
    to_go = torch.tensor(
        [sum(0.9 ** (k - t) * float(batch.rewards[env, k]) for k in range(t, lengths[env])) for env, t in where],
        dtype=torch.float64,
    )
    weights = (to_go - to_go.mean()) / to_go.std(correction=0) if whiten else to_go
    log_pi = torch.log_softmax(algorithm.actor(batch.observations).double(), -1)
    chosen = torch.stack([log_pi[env, t, batch.actions[env, t]] for env, t in where])
    entropy = torch.stack([-(log_pi[env, t].exp() * log_pi[env, t]).sum() for env, t in where])
    loss = -(weights * chosen).mean() - 0.5 * entropy.mean()
    expected = torch.autograd.grad(loss, list(algorithm.actor.parameters()))
    algorithm.learn(batch, playing)
    for parameter, gradient in zip(algorithm.actor.parameters(), expected, strict=True):
        assert_close(parameter.grad, gradient, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize(
    ("task", "observations", "expected"),
    [
        (tasks.GoodAndBadAction, [[1.0]], [[0.0, 1.0]]),
        (tasks.ActionMatchesObservation, [[-1.0], [1.0]], [[1.0, 0.0], [0.0, 1.0]]),
    ],
)
def test_it_learns_the_policy_probes(task, observations, expected, seed):
    # kills: the sign of the gradient, actions mismatched with observations
    envs = tasks.make_task(task, num_envs=64)
    algorithm = make_reinforce(envs, total_steps=20_000, seed=seed)
    list(algorithm.train())
    found = algorithm.actor(torch.tensor(observations)).softmax(-1)
    assert_close(found, torch.tensor(expected), rtol=0, atol=2e-2)


def test_it_stops_at_the_first_batch_that_reaches_the_steps():
    # kills: counting steps after an end, or vector steps
    rows = list(make_reinforce(total_steps=300).train())
    assert rows[-2]["step"] < 300 <= rows[-1]["step"]
    lengths = [row["step"] - previous for row, previous in zip(rows, [0] + [r["step"] for r in rows], strict=False)]
    assert lengths == [pytest.approx(3 * row["episode_return"]) for row in rows]  # CartPole pays 1 per step
    assert [row["episodes"] for row in rows] == [3] * len(rows)


OTHER = {
    "seed": 1, "total_steps": 400, "hidden_size": 9, "gamma": 0.5, "entropy_coef": 1.0, "whiten_advantages": False,
    "adam_epsilon": 0.1, "max_grad_norm": 1e-3, "learning_rate": 0.1,
}  # fmt: skip


def run(**settings):
    algorithm = make_reinforce(**settings)
    return list(algorithm.train()), [p.detach().clone() for p in algorithm.actor.parameters()]


def equal(a, b):
    return a[0] == b[0] and all(torch.equal(x, y) for x, y in zip(a[1], b[1], strict=True))


def test_the_same_seed_twice_is_the_same_run_to_the_last_bit():
    # kills: any use of global random numbers
    first = run()
    torch.manual_seed(123)
    assert equal(first, run())


@pytest.mark.parametrize("name", [f.name for f in dataclasses.fields(ReinforceConfig)])
def test_every_setting_changes_the_run(name):
    # kills: a setting that is read nowhere
    assert not equal(run(), run(**{name: OTHER[name]}))
