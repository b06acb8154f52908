"""The algorithm piece by piece: what is stored, what is computed from it, what the update does."""

import dataclasses
import math
from itertools import chain

import gymnasium as gym
import numpy as np
import pytest
import torch
from gymnasium.spaces import Box, Discrete
from torch.testing import assert_close

import cartpole_baseline.ppo
import cartpole_baseline.reinforce
import rlhf_kit.functional
from cartpole_baseline.config import PPOConfig
from cartpole_baseline.environments import AUTORESET_MODES, evaluate, make_envs
from cartpole_baseline.ppo import PPO, Batch, EpisodeReturns, Rollout, advantages_and_returns, play, sample

pytestmark = pytest.mark.usefixtures("one_thread")

SMALL = {"total_steps": 96, "num_steps": 16, "num_mini_batches": 3, "ppo_epochs": 2, "hidden_size": 8}


class Script(gym.Env):
    """Counts: observation = 100 * episode + step. Ends as told, episode by episode; pays its observation."""

    action_space = Discrete(2)
    observation_space = Box(-np.inf, np.inf, (1,), np.float32)

    def __init__(self, endings):
        self.endings, self.episode = endings, 0  # (length, terminated, truncated) of each episode

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.episode, self.time = self.episode + 1, 0
        return self._observe(), {}

    def _observe(self):
        return np.array([100 * self.episode + self.time], np.float32)

    def step(self, action):
        self.time += 1
        length, terminated, truncated = self.endings[self.episode - 1]
        ended = self.time == length
        return self._observe(), float(self._observe()[0]), terminated and ended, truncated and ended, {}


def scripted(mode, copy=True):
    """Two environments with episodes of 2, 3, 99 and of 3, 1, 99 steps."""
    first = [(2, True, False), (3, False, True), (99, False, False)]
    second = [(3, False, True), (1, True, True), (99, False, False)]
    return gym.vector.SyncVectorEnv(
        [lambda: Script(first), lambda: Script(second)], autoreset_mode=AUTORESET_MODES[mode], copy=copy
    )


def make_ppo(envs=None, **settings):
    return PPO(envs or make_envs("CartPole-v1", 2), PPOConfig(**(SMALL | settings)))


def weights_of(algorithm):
    return [p.detach().clone() for p in chain(algorithm.actor.parameters(), algorithm.critic.parameters())]


def collect(mode, rollouts=1, num_steps=8, copy=True):
    algorithm = make_ppo(scripted(mode, copy), num_steps=num_steps, num_mini_batches=1)
    steps = play(algorithm.envs, algorithm.actor, algorithm.generator, seed=0)
    return [algorithm.collect(steps) for _ in range(rollouts)]


# What is stored


def test_next_step_autoreset_row_by_row():
    # kills: reset rows counted as real; the reset observation taken for the final one
    (rollout,) = collect("next_step")
    assert rollout.observations[0, :, 0].tolist() == [100, 101, 102, 200, 201, 202, 203, 300]
    assert rollout.final_observations[0, :, 0].tolist() == [101, 102, 200, 201, 202, 203, 300, 301]
    assert rollout.real[0].tolist() == [True, True, False, True, True, True, False, True]
    assert rollout.rewards[0].tolist() == [101, 102, 0, 201, 202, 203, 0, 301]
    assert rollout.terminated[0].nonzero().flatten().tolist() == [1]
    assert rollout.truncated[0].nonzero().flatten().tolist() == [5]
    assert rollout.final_observations[1, rollout.truncated[1], 0].tolist() == [103, 201]


def test_same_step_autoreset_row_by_row():
    # kills: final_observations = next observations under SAME_STEP; rows dropped as resets
    (rollout,) = collect("same_step")
    assert rollout.observations[0, :, 0].tolist() == [100, 101, 200, 201, 202, 300, 301, 302]
    assert rollout.final_observations[0, :, 0].tolist() == [101, 102, 201, 202, 203, 301, 302, 303]
    assert rollout.real.all()
    assert rollout.terminated[0].nonzero().flatten().tolist() == [1]
    assert rollout.truncated[0].nonzero().flatten().tolist() == [4]


@pytest.mark.parametrize("mode", sorted(AUTORESET_MODES))
def test_rollouts_join_without_a_seam(mode):
    # kills: a reset between rollouts; the row after an end taken for real when it opens a rollout
    (whole,) = collect(mode, num_steps=8)
    parts = collect(mode, rollouts=4, num_steps=2)
    for f in dataclasses.fields(Rollout):
        joined = torch.cat([getattr(part, f.name) for part in parts], dim=1)
        assert_close(joined, getattr(whole, f.name), rtol=0, atol=1e-6, msg=f.name)


@pytest.mark.parametrize("mode", sorted(AUTORESET_MODES))
def test_environments_may_reuse_their_arrays(mode):
    # kills: np.array(..., copy) replaced by a view of the environment's own array
    (copied,), (reused,) = collect(mode), collect(mode, copy=False)
    assert torch.equal(copied.observations, reused.observations)
    assert torch.equal(copied.final_observations, reused.final_observations)


def test_old_logprobs_and_values_are_those_of_the_networks_that_played():
    # kills: log-probs of other actions, values of other observations
    algorithm = make_ppo()
    rollout = algorithm.collect(play(algorithm.envs, algorithm.actor, algorithm.generator, seed=0))
    for env in range(2):
        for t in range(16):
            logits = algorithm.actor(rollout.observations[env, t]).double()
            expected = torch.log_softmax(logits, -1)[rollout.actions[env, t]]
            assert_close(rollout.old_logprobs[env, t].double(), expected, rtol=0, atol=1e-6)
            value = algorithm.critic(rollout.observations[env, t])[0]
            assert_close(rollout.old_values[env, t], value, rtol=1e-5, atol=1e-6)
            final = algorithm.critic(rollout.final_observations[env, t])[0]
            assert_close(rollout.final_values[env, t], final, rtol=1e-5, atol=1e-6)


def test_actions_are_drawn_from_the_softmax_of_the_logits():
    # kills: argmax without noise, noise of the wrong sign or scale
    logits = torch.tensor([0.0, 1.0, -2.0, 0.5])
    drawn = sample(logits.expand(200_000, 4), torch.Generator().manual_seed(0))
    assert_close(drawn.bincount(minlength=4) / 200_000, logits.softmax(-1), rtol=0, atol=4e-3)


# Advantages


def rollout_of(rewards, values, final_values, terminated, truncated, real=None):
    row = lambda x, kind=torch.float32: torch.tensor([x], dtype=kind)  # noqa: E731
    flags = [row(x, torch.bool) for x in (terminated, truncated, real or [True] * len(rewards))]
    empty = torch.zeros(1, len(rewards), 1)
    return Rollout(
        empty, empty[..., 0].long(), row(rewards), flags[0], flags[1], empty, flags[2],
        empty[..., 0], row(values), row(final_values),
    )  # fmt: skip


def naive_returns(rollout, gamma, gae_lambda):
    """Each advantage as the sum that defines it, forwards from its own step. Float64, no recursion."""
    rows = {"reward": rollout.rewards, "value": rollout.old_values, "next": rollout.final_values}
    found = []
    for t in range(rollout.rewards.shape[1]):
        total, weight = 0.0, 1.0
        for k in range(t, rollout.rewards.shape[1]):
            reward, value, following = (float(rows[name][0, k]) for name in ("reward", "value", "next"))
            fell = bool(rollout.terminated[0, k])
            total += weight * (reward + (0.0 if fell else gamma * following) - value)
            weight *= gamma * gae_lambda
            if fell or bool(rollout.truncated[0, k]):
                break
        found.append(total + float(rollout.old_values[0, t]))
    return found


def test_worked_example_with_a_fall():
    # kills: bootstrapping from a fall. The value after the fall is a placeholder.
    for placeholder in (123.0, -999.0, math.nan):
        rollout = rollout_of(
            [0.0, 1.0, 0.0], [0.2, 0.4, 0.3], [0.4, placeholder, 0.5], [False, True, False], [False] * 3
        )
        advantages, returns = advantages_and_returns(rollout, gamma=0.9, gae_lambda=0.8)
        assert_close(advantages, torch.tensor([[0.592, 0.6, 0.15]]))
        assert_close(returns, torch.tensor([[0.792, 1.0, 0.45]]))


def test_worked_example_with_a_timer():
    # The same three steps, the second cut by the timer at an observation worth 0.7: 1 + 0.9 x 0.7 = 1.63.
    # kills: timer treated as a fall (0.6), value of the reset observation (0.3), credit across the cut
    rollout = rollout_of([0.0, 1.0, 0.0], [0.2, 0.4, 0.3], [0.4, 0.7, 0.5], [False] * 3, [False, True, False])
    advantages, returns = advantages_and_returns(rollout, gamma=0.9, gae_lambda=0.8)
    assert_close(advantages, torch.tensor([[0.16 + 0.72 * 1.23, 1.23, 0.15]]))
    assert_close(returns[0, 1], torch.tensor(1.63))


def test_terminated_wins_over_truncated():
    # kills: bootstrapping where both flags are set
    rollout = rollout_of([1.0], [0.0], [50.0], [True], [True])
    assert_close(advantages_and_returns(rollout, gamma=0.9, gae_lambda=0.8)[1], torch.tensor([[1.0]]))


@pytest.mark.parametrize("gae_lambda", [0.0, 0.7, 1.0])
@pytest.mark.parametrize("seed", range(5))
def test_advantages_equal_the_sums_that_define_them(seed, gae_lambda):
    # kills: any mix-up of the two masks; a wrong bootstrap at the end of the rollout
    random = np.random.default_rng(seed)
    steps = 12
    values = random.normal(size=steps + 1)
    terminated, truncated = random.random(steps) < 0.2, random.random(steps) < 0.2
    final_values = np.where(terminated | truncated, random.normal(size=steps), values[1:])
    rollout = rollout_of(
        *(x.tolist() for x in (random.normal(size=steps), values[:-1], final_values, terminated, truncated))
    )
    returns = advantages_and_returns(rollout, gamma=0.9, gae_lambda=gae_lambda)[1]
    assert_close(returns[0].double(), torch.tensor(naive_returns(rollout, 0.9, gae_lambda), dtype=torch.float64),
                 rtol=1e-5, atol=1e-5)  # fmt: skip


# The update


def test_reset_rows_enter_neither_targets_nor_loss():
    # kills: real left out of whitening, of explained variance or of the batch
    def learn(poison):
        algorithm = make_ppo(scripted("next_step"), num_steps=8, total_steps=16)
        rollout = algorithm.collect(play(algorithm.envs, algorithm.actor, algorithm.generator, seed=0))
        assert (~rollout.real).sum() == 4
        if poison:
            for f in dataclasses.fields(Rollout):
                tensor = getattr(rollout, f.name)
                if tensor.is_floating_point():
                    tensor[~rollout.real] = math.nan
        return algorithm.learn(rollout), weights_of(algorithm)

    (metrics, weights), (poisoned_metrics, poisoned_weights) = learn(poison=False), learn(poison=True)
    assert metrics == poisoned_metrics
    assert all(torch.equal(a, b) for a, b in zip(weights, poisoned_weights, strict=True))


def test_every_real_row_is_used_once_per_epoch(monkeypatch):
    # kills: the remainder dropped; no shuffle; one permutation for all epochs
    algorithm = make_ppo(scripted("next_step"), num_steps=8, total_steps=16)
    rollout = algorithm.collect(play(algorithm.envs, algorithm.actor, algorithm.generator, seed=0))
    seen = []
    step = algorithm.step
    monkeypatch.setattr(
        algorithm, "step", lambda batch: (seen.append(batch.observations[:, 0].tolist()), step(batch))[1]
    )
    algorithm.learn(rollout)
    assert [len(rows) for rows in seen] == [4, 4, 4] * 2
    expected = sorted(rollout.observations[rollout.real][:, 0].tolist())
    epochs = [list(chain(*seen[:3])), list(chain(*seen[3:]))]
    assert [sorted(rows) for rows in epochs] == [expected, expected]
    assert epochs[0] != epochs[1]
    assert epochs[0] != expected


def test_uneven_mini_batches_differ_by_one_row_at_most(monkeypatch):
    # kills: split into chunks of a fixed size with a tiny rest
    algorithm = make_ppo(make_envs("CartPole-v1", 5), num_steps=4, total_steps=20, num_mini_batches=3)
    sizes = []
    step = algorithm.step
    monkeypatch.setattr(algorithm, "step", lambda batch: (sizes.append(len(batch.actions)), step(batch))[1])
    list(algorithm.train())
    assert sizes == [7, 7, 6] * 2


def norm(tensors):
    return torch.stack([tensor.square().sum() for tensor in tensors]).sum().sqrt()


def test_the_gradient_is_that_of_the_objective():
    # kills: wrong sign or weight of any of the three terms; gradient not clipped
    algorithm = make_ppo(num_mini_batches=1, entropy_coef=0.3, value_coef=0.7, clip_range=0.1, max_grad_norm=math.inf)
    torch.manual_seed(0)
    rows = 40
    batch = Batch(
        torch.randn(rows, 4), torch.randint(0, 2, (rows,)), torch.full((rows,), -0.7) + 0.3 * torch.randn(rows),
        torch.randn(rows), torch.randn(rows), torch.randn(rows),
    )  # fmt: skip
    log_pi = torch.log_softmax(algorithm.actor(batch.observations).double(), -1)
    ratio = (log_pi[range(rows), batch.actions] - batch.old_logprobs).exp()
    surrogate = torch.minimum(ratio * batch.advantages, ratio.clamp(0.9, 1.1) * batch.advantages).mean()
    value_loss = 0.5 * (algorithm.critic(batch.observations).squeeze(-1) - batch.returns).square().mean()
    entropy = -(log_pi.exp() * log_pi).sum(-1).mean()
    parameters = [*algorithm.actor.parameters(), *algorithm.critic.parameters()]
    expected = torch.autograd.grad(-(surrogate - 0.7 * value_loss + 0.3 * entropy), parameters)
    found = algorithm.step(batch)
    for parameter, gradient in zip(parameters, expected, strict=True):
        assert_close(parameter.grad, gradient, rtol=1e-4, atol=1e-6)
    norms = [norm(expected[:6]), norm(expected[6:])]
    numbers = [-surrogate, value_loss, entropy, *norms]
    assert_close(found.double(), torch.stack([x.detach().double() for x in numbers]), rtol=1e-4, atol=1e-6)


def test_gradients_are_clipped_to_the_norm():
    # kills: clipping left out, or of both networks together (the critic's would drown the actor's)
    algorithm = make_ppo(max_grad_norm=1e-3)
    list(algorithm.train())
    for network in (algorithm.actor, algorithm.critic):
        assert_close(norm([p.grad for p in network.parameters()]), torch.tensor(1e-3), rtol=1e-2, atol=0)


def test_a_gradient_that_is_not_finite_changes_no_weight():
    # kills: NaN reaching the optimizer
    algorithm = make_ppo()
    before = weights_of(algorithm)
    numbers = torch.zeros(4)
    batch = Batch(torch.zeros(4, 4), numbers.long(), numbers, numbers, numbers, torch.full((4,), math.inf))
    with pytest.raises(FloatingPointError, match="lower the learning rates"):
        algorithm.step(batch)
    assert all(torch.equal(a, b) for a, b in zip(before, weights_of(algorithm), strict=True))


@pytest.mark.parametrize(("updates", "shares"), [(1, [1]), (2, [1, 0.4]), (4, [1, 0.8, 0.6, 0.4])])
def test_the_learning_rates_end_at_their_final_values(updates, shares):
    # kills: 1 - update / num_updates, which never arrives; one rate for both networks
    algorithm = make_ppo(total_steps=updates * 32, learning_rate=0.01, value_learning_rate=0.03, final_lr_fraction=0.4)
    rates = []
    for metrics in algorithm.train():
        rates.append((metrics["learning_rate"], metrics["value_learning_rate"]))
        assert tuple(group["lr"] for group in algorithm.optimizer.param_groups) == rates[-1]
    assert rates == [pytest.approx((0.01 * share, 0.03 * share), rel=1e-12) for share in shares]
    assert updates == 1 or rates[-1] == (0.01 * 0.4, 0.03 * 0.4)
    (actor, critic) = (group["params"] for group in algorithm.optimizer.param_groups)
    assert [id(p) for p in actor] == [id(p) for p in algorithm.actor.parameters()]
    assert [id(p) for p in critic] == [id(p) for p in algorithm.critic.parameters()]


def test_kl_stop_ends_the_update_after_an_epoch():
    # kills: the stop left out; stop in the middle of an epoch
    metrics = list(make_ppo(max_approx_kl=1e-9, ppo_epochs=7, final_lr_fraction=1.0).train())
    assert {row["optimizer_steps"] for row in metrics} == {3}
    metrics = list(make_ppo(max_approx_kl=1e9, ppo_epochs=7).train())
    assert {row["optimizer_steps"] for row in metrics} == {21}


def test_distance_is_measured_after_the_update_over_the_whole_rollout():
    # kills: approx_kl or clip_fraction against the wrong policy, or before the update
    algorithm = make_ppo(learning_rate=0.05, clip_range=0.05)
    rollout = algorithm.collect(play(algorithm.envs, algorithm.actor, algorithm.generator, seed=0))
    metrics = algorithm.learn(rollout)
    log_ratio = torch.log_softmax(algorithm.actor(rollout.observations), -1)
    log_ratio = log_ratio.gather(-1, rollout.actions[..., None])[..., 0] - rollout.old_logprobs
    log_ratio = log_ratio[rollout.real].double().detach()
    assert metrics["approx_kl"] == pytest.approx(float((log_ratio.exp() - 1 - log_ratio).mean()), rel=1e-3)
    clipped = float(((log_ratio.exp() - 1).abs() > 0.05).double().mean())
    assert metrics["clip_fraction"] == pytest.approx(clipped)
    assert 0 < clipped < 1


def test_advantages_are_whitened_over_the_real_rows(monkeypatch):
    # kills: no whitening; whitening although switched off
    stats = {}
    for whiten in (True, False):
        algorithm = make_ppo(whiten_advantages=whiten, ppo_epochs=1)
        rows = []
        step = algorithm.step
        monkeypatch.setattr(
            algorithm, "step", lambda batch, step=step, rows=rows: (rows.append(batch.advantages), step(batch))[1]
        )
        next(algorithm.train())
        joined = torch.cat(rows)
        stats[whiten] = (float(joined.mean()), float(joined.std(correction=0)))
    assert stats[True] == pytest.approx((0, 1), abs=1e-5)
    assert stats[False] != pytest.approx((0, 1), abs=0.1)


# The whole


def run(seed=0, evaluating=False, **settings):
    algorithm = make_ppo(seed=seed, **settings)
    test_envs = make_envs("CartPole-v1", 3)
    metrics = []
    for row in algorithm.train():
        metrics.append(row)
        if evaluating:
            evaluate(test_envs, algorithm.actor, greedy=False, seed=5)
            torch.rand(3)
    return metrics, weights_of(algorithm)


def equal(a, b):
    return a[0] == b[0] and all(torch.equal(x, y) for x, y in zip(a[1], b[1], strict=True))


def test_the_same_seed_twice_is_the_same_run_to_the_last_bit():
    # kills: any use of global random numbers; evaluation that draws from the run's own
    first = run()
    torch.manual_seed(123)
    np.random.seed(123)
    assert equal(first, run(evaluating=True))
    assert not equal(first, run(seed=1))


OTHER = {
    "seed": 1, "total_steps": 128, "num_steps": 12, "num_mini_batches": 2, "ppo_epochs": 3, "hidden_size": 9,
    "gamma": 0.5, "gae_lambda": 0.5, "learning_rate": 0.1, "value_learning_rate": 0.1,
    "final_lr_fraction": 1.0, "adam_epsilon": 0.1,
    "max_grad_norm": 0.01, "clip_range": 0.001, "value_clip_range": 0.001, "value_coef": 0.1, "entropy_coef": 1.0,
    "whiten_advantages": False, "max_approx_kl": 1e-9,
}  # fmt: skip


@pytest.mark.parametrize("name", [f.name for f in dataclasses.fields(PPOConfig)])
def test_every_setting_changes_the_run(name):
    # kills: a setting that is read nowhere
    assert not equal(run(), run(**{name: OTHER[name]}))


def test_actor_and_critic_share_no_weight_and_start_orthogonal():
    # kills: a shared trunk; default initialisation; a large first policy
    algorithm = make_ppo(hidden_size=64)
    actor, critic = list(algorithm.actor.parameters()), list(algorithm.critic.parameters())
    assert {p.data_ptr() for p in actor} & {p.data_ptr() for p in critic} == set()
    for network, gain in [(algorithm.actor, 0.01), (algorithm.critic, 1.0)]:
        first, middle, last = network[0].weight, network[2].weight, network[4].weight
        assert_close(first.T @ first, 2 * torch.eye(4), rtol=0, atol=1e-5)
        assert_close(middle @ middle.T, 2 * torch.eye(64), rtol=0, atol=1e-4)
        assert_close(last @ last.T, gain**2 * torch.eye(len(last)), rtol=0, atol=1e-5)
        assert all(not layer.bias.any() for layer in (network[0], network[2], network[4]))
    assert algorithm.optimizer.defaults["eps"] == 1e-5


def test_returns_of_episodes_that_span_rollouts():
    # kills: sums that start anew with each rollout, or go on over an end
    (whole,), parts = collect("next_step", num_steps=8), collect("next_step", rollouts=4, num_steps=2)
    ends = lambda rollout: rollout.terminated | rollout.truncated  # noqa: E731
    episodes = EpisodeReturns(2)
    assert episodes.add(whole.rewards, ends(whole)) == {
        "episodes": 4,
        "episode_return": np.mean([101 + 102, 201 + 202 + 203, 101 + 102 + 103, 201]),
    }
    episodes = EpisodeReturns(2)
    found = [episodes.add(part.rewards, ends(part)) for part in parts]
    assert [row["episodes"] for row in found] == [1, 1, 2, 0]
    assert [row.get("episode_return") for row in found] == [203, 306, (201 + 606) / 2, None]


@pytest.mark.parametrize("module", [cartpole_baseline.ppo, cartpole_baseline.reinforce], ids=["ppo", "reinforce"])
def test_the_maths_is_that_of_the_language_model_trainer(module):
    # kills: a private copy of a formula
    shared = {name for name in rlhf_kit.functional.__all__ if hasattr(module, name)}
    assert shared >= {"compute_gae", "masked_whiten", "token_logprobs", "entropy_from_logits"}
    if module is cartpole_baseline.ppo:
        assert shared >= {"clipped_policy_loss", "clipped_value_loss", "approx_kl", "clip_fraction"}
    for name in shared:
        assert getattr(module, name) is getattr(rlhf_kit.functional, name)
