"""compute_gae against its definition as a sum over later steps (not the recursion), and explained_variance."""

import math
import statistics

import pytest
import torch
from torch.testing import assert_close

from rlhf_kit.functional import compute_gae, explained_variance

GARBAGE = [math.nan, math.inf, -math.inf, 100.0, -999.0]


def slow_gae(rewards, values, continues, bootstrap, gamma, lam):
    """One row of floats: A_t = sum over k of (gamma lambda)^k delta_{t+k}, up to the end of the trajectory of t."""
    steps = len(rewards)
    advantages = []
    for t in range(steps):
        total = 0.0
        for k in range(steps - t):
            s = t + k
            after = 0.0
            if continues[s]:
                after = bootstrap if s == steps - 1 else values[s + 1]
            total += (gamma * lam) ** k * (rewards[s] + gamma * after - values[s])
            if not continues[s]:
                break
        advantages.append(total)
    return advantages


def random_rollout(seed, *shape):
    generator = torch.Generator().manual_seed(seed)
    rewards, values = (torch.randn(*shape, generator=generator, dtype=torch.float64) for _ in range(2))
    bootstrap = torch.randn(shape[:-1], generator=generator, dtype=torch.float64)
    continues = torch.rand(*shape, generator=generator) < 0.7
    return rewards, values, continues, bootstrap


def two_steps(*, bootstrap=3.0, last_continues=1.0, requires_grad=False):
    inputs = [torch.tensor([1.0, 2.0]), torch.tensor([0.5, 1.0]), torch.tensor(bootstrap)]
    for tensor in inputs:
        tensor.requires_grad_(requires_grad)
    rewards, values, bootstrap_value = inputs
    result = compute_gae(
        rewards,
        values,
        continues=torch.tensor([1.0, last_continues]),
        bootstrap_value=bootstrap_value,
        gamma=0.5,
        gae_lambda=0.25,
    )
    return inputs, result


# kills: delta uses V_t where V_{t+1} belongs (values shifted by one)
def test_two_steps_by_hand():
    # delta_1 = 2 + 0.5 * 3 - 1 = 2.5; delta_0 = 1 + 0.5 * 1 - 0.5 = 1; A_0 = 1 + 0.125 * 2.5
    _, (advantages, returns) = two_steps()
    assert_close(advantages, torch.tensor([1.3125, 2.5]))
    assert_close(returns, torch.tensor([1.8125, 3.5]))


# kills: the recursion multiplies by gamma alone (lambda dropped)
def test_two_steps_gradient_by_hand():
    (rewards, values, bootstrap), (advantages, _) = two_steps(requires_grad=True)
    advantages[0].backward()
    assert_close(rewards.grad, torch.tensor([1.0, 0.125]))
    assert_close(values.grad, torch.tensor([-1.0, 0.5 - 0.125]))
    assert_close(bootstrap.grad, torch.tensor(0.125 * 0.5))


# kills: returns are advantages - values
def test_returns_gradient_by_hand():
    (rewards, values, bootstrap), (_, returns) = two_steps(requires_grad=True)
    returns[0].backward()
    assert_close(rewards.grad, torch.tensor([1.0, 0.125]))
    assert_close(values.grad, torch.tensor([0.0, 0.5 - 0.125]))
    assert_close(bootstrap.grad, torch.tensor(0.125 * 0.5))


# kills: next_advantage is not cut where the trajectory ends
@pytest.mark.parametrize("shape", [(9,), (4, 9), (2, 3, 9)])
@pytest.mark.parametrize(("gamma", "lam"), [(0.9, 0.8), (1.0, 0.95), (0.99, 1.0), (1.0, 1.0), (0.7, 0.0), (0.0, 0.5)])
def test_matches_the_sum_over_later_steps(shape, gamma, lam):
    rewards, values, continues, bootstrap = random_rollout(len(shape), *shape)
    advantages, returns = compute_gae(
        rewards, values, continues=continues, bootstrap_value=bootstrap, gamma=gamma, gae_lambda=lam
    )
    rows = zip(
        rewards.reshape(-1, 9).tolist(),
        values.reshape(-1, 9).tolist(),
        continues.reshape(-1, 9).tolist(),
        bootstrap.reshape(-1).tolist(),
        strict=True,
    )
    expected = torch.tensor([slow_gae(*row, gamma, lam) for row in rows], dtype=torch.float64).reshape(shape)
    assert_close(advantages, expected)
    assert_close(returns, expected + values)


# kills: lambda and gamma swapped in the bootstrapped term (gamma V becomes lambda V)
def test_lambda_0_is_the_one_step_error():
    rewards, values, _, bootstrap = random_rollout(1, 3, 5)
    advantages, returns = compute_gae(
        rewards, values, continues=torch.ones(3, 5), bootstrap_value=bootstrap, gamma=0.6, gae_lambda=0.0
    )
    later = torch.cat([values[:, 1:], bootstrap[:, None]], dim=1)
    assert_close(advantages, rewards + 0.6 * later - values)
    assert_close(returns, rewards + 0.6 * later)


# kills: the recursion has one gamma too few (next_advantage times lambda only)
def test_lambda_1_gives_discounted_returns_whatever_the_critic_says():
    rewards, values, _, bootstrap = random_rollout(2, 3, 5)
    discounted = [
        sum(0.6**k * row[t + k] for k in range(5 - t)) + 0.6 ** (5 - t) * last
        for row, last in zip(rewards.tolist(), bootstrap.tolist(), strict=True)
        for t in range(5)
    ]
    for critic in (values, 7 - 3 * values):
        advantages, returns = compute_gae(
            rewards, critic, continues=torch.ones(3, 5), bootstrap_value=bootstrap, gamma=0.6, gae_lambda=1.0
        )
        assert_close(returns, torch.tensor(discounted, dtype=torch.float64).reshape(3, 5))
        assert_close(advantages, returns - critic)


# kills: gamma is not applied to the next value
def test_gamma_0_looks_at_the_reward_alone():
    rewards, values, continues, bootstrap = random_rollout(3, 3, 5)
    advantages, returns = compute_gae(
        rewards, values, continues=continues, bootstrap_value=bootstrap, gamma=0.0, gae_lambda=1.0
    )
    assert_close(advantages, rewards - values)
    assert_close(returns, rewards)


# kills: next_value is not cut where the trajectory ends
@pytest.mark.parametrize("garbage", GARBAGE)
def test_nothing_behind_the_end_of_a_trajectory_leaks_back(garbage):
    rewards, values, _, bootstrap = random_rollout(4, 6)
    continues = torch.tensor([1, 1, 0, 1, 1, 1])

    def first_trajectory(junk):
        r, v = rewards.clone(), values.clone()
        r[3:], v[3:] = junk, junk
        r.requires_grad_()
        v.requires_grad_()
        last = torch.full_like(bootstrap, junk).requires_grad_()
        advantages, returns = compute_gae(r, v, continues=continues, bootstrap_value=last, gamma=0.9, gae_lambda=0.8)
        (advantages[:3].square().sum() + returns[:3].sum()).backward()
        return advantages[:3].detach(), returns[:3].detach(), r.grad, v.grad, last.grad

    dirty, clean = first_trajectory(garbage), first_trajectory(0.0)
    for got, expected in zip(dirty, clean, strict=True):
        assert torch.equal(got, expected)
    assert dirty[2][3:].eq(0).all()
    assert dirty[3][3:].eq(0).all()


# kills: ends are cut by multiplying with continues (NaN * 0 is NaN)
@pytest.mark.parametrize("garbage", GARBAGE)
def test_right_padding_changes_no_real_token(garbage):
    rewards, values, _, bootstrap = random_rollout(5, 4, 6)
    lengths = torch.tensor([1, 3, 5, 6])
    real = torch.arange(6) < lengths[:, None]
    continues = torch.arange(6) < lengths[:, None] - 1
    junk = torch.tensor(garbage, dtype=torch.float64)
    advantages, returns = compute_gae(
        torch.where(real, rewards, junk),
        torch.where(real, values, junk),
        continues=continues,
        bootstrap_value=torch.full_like(bootstrap, garbage),
        gamma=1.0,
        gae_lambda=0.95,
    )
    for row, length in enumerate(lengths.tolist()):
        r, v = rewards[row, :length].tolist(), values[row, :length].tolist()
        expected = slow_gae(r, v, [True] * (length - 1) + [False], garbage, 1.0, 0.95)
        assert_close(advantages[row, :length].tolist(), expected)
        assert_close(returns[row, :length].tolist(), [a + b for a, b in zip(expected, v, strict=True)])


# kills: bootstrap_value is never read (the recursion starts from 0)
def test_bootstrap_is_read_only_if_the_last_step_continues():
    _, (goes_on, _) = two_steps(bootstrap=5.0)
    assert_close(goes_on, torch.tensor([1.4375, 3.5]))  # delta_1 = 2 + 2.5 - 1
    for anything in GARBAGE:
        _, (ended, _) = two_steps(bootstrap=anything, last_continues=0.0)
        assert_close(ended, torch.tensor([1.125, 1.0]))  # delta_1 = 2 - 1


# kills: continues[t + 1] is read in place of continues[t]
def test_each_step_reads_its_own_continues():
    ones, zeros = torch.ones(3), torch.zeros(3)
    for cut, expected in [(0, [1.0, 3.0, 2.0]), (1, [2.0, 1.0, 2.0]), (2, [3.0, 2.0, 1.0])]:
        continues = torch.tensor([t != cut for t in range(3)])
        advantages, _ = compute_gae(
            ones, zeros, continues=continues, bootstrap_value=torch.tensor(1.0), gamma=1.0, gae_lambda=1.0
        )
        assert_close(advantages, torch.tensor(expected))


# kills: ends are ignored in the advantage but not in the value (only next_value is cut)
def test_a_truncated_step_may_carry_its_bootstrap_in_the_reward():
    rewards, values, _, final_value = random_rollout(6, 2, 4)
    whole = compute_gae(
        rewards, values, continues=torch.ones(2, 4), bootstrap_value=final_value, gamma=0.9, gae_lambda=0.7
    )
    folded = rewards.clone()
    folded[:, -1] += 0.9 * final_value
    # The same four steps, followed by two steps of another episode.
    joined = compute_gae(
        torch.cat([folded, torch.full((2, 2), 8.0)], dim=1),
        torch.cat([values, torch.full((2, 2), -5.0)], dim=1),
        continues=torch.tensor([[1, 1, 1, 0, 1, 1]] * 2),
        bootstrap_value=torch.full((2,), 11.0, dtype=torch.float64),
        gamma=0.9,
        gae_lambda=0.7,
    )
    assert_close(joined[0][:, :4], whole[0])
    assert_close(joined[1][:, :4], whole[1])


# kills: continues is used without .bool()
@pytest.mark.parametrize("dtype", [torch.bool, torch.int64, torch.float32])
def test_continues_may_be_bool_or_0_and_1(dtype):
    rewards, values, continues, bootstrap = random_rollout(7, 3, 5)
    expected = compute_gae(rewards, values, continues=continues, bootstrap_value=bootstrap, gamma=0.9, gae_lambda=0.8)
    got = compute_gae(
        rewards, values, continues=continues.to(dtype), bootstrap_value=bootstrap, gamma=0.9, gae_lambda=0.8
    )
    assert torch.equal(got[0], expected[0])
    assert torch.equal(got[1], expected[1])


# kills: time is the first axis
def test_rows_do_not_mix():
    rewards, values, continues, bootstrap = random_rollout(8, 5, 5)
    together, _ = compute_gae(
        rewards, values, continues=continues, bootstrap_value=bootstrap, gamma=0.9, gae_lambda=0.8
    )
    for row in range(5):
        alone, _ = compute_gae(
            rewards[row],
            values[row],
            continues=continues[row],
            bootstrap_value=bootstrap[row],
            gamma=0.9,
            gae_lambda=0.8,
        )
        assert torch.equal(together[row], alone)


# kills: advantages are written into the storage of values
def test_inputs_are_left_alone():
    inputs = random_rollout(9, 3, 5)
    before = [tensor.clone() for tensor in inputs]
    rewards, values, continues, bootstrap = inputs
    compute_gae(rewards, values, continues=continues, bootstrap_value=bootstrap, gamma=0.9, gae_lambda=0.8)
    for now, then in zip(inputs, before, strict=True):
        assert torch.equal(now, then)


# kills: the loop stops before t = 0
@pytest.mark.parametrize(("continues", "expected"), [(True, 2.0 + 0.9 * 3.0 - 0.5), (False, 2.0 - 0.5)])
def test_one_step(continues, expected):
    advantages, returns = compute_gae(
        torch.tensor([2.0]),
        torch.tensor([0.5]),
        continues=torch.tensor([continues]),
        bootstrap_value=torch.tensor(3.0),
        gamma=0.9,
        gae_lambda=0.8,
    )
    assert_close(advantages, torch.tensor([expected]))
    assert_close(returns, torch.tensor([expected + 0.5]))


# kills: gamma * gae_lambda is applied to the TD error too
def test_gae_gradcheck():
    rewards, values, continues, bootstrap = random_rollout(10, 2, 4)

    def gae(rewards, values, bootstrap):
        return compute_gae(rewards, values, continues=continues, bootstrap_value=bootstrap, gamma=0.9, gae_lambda=0.8)

    inputs = [tensor.requires_grad_() for tensor in (rewards, values, bootstrap)]
    assert torch.autograd.gradcheck(gae, inputs)
    # gradcheck only compares code with itself, so pin one entry: reward 2 reaches A_1 by gamma lambda continues_1.
    (gradient,) = torch.autograd.grad(gae(*inputs)[0][0, 1], rewards)
    assert_close(gradient[0, 1:3].tolist(), [1.0, 0.72 * float(continues[0, 1])])


# kills: the three-way shape comparison skips continues
@pytest.mark.parametrize("wrong", ["rewards", "values", "continues"])
def test_gae_refuses_shapes_that_differ(wrong):
    shapes = {"rewards": (2, 3), "values": (2, 3), "continues": (2, 3)} | {wrong: (1, 3)}
    rewards, values, continues = (torch.zeros(shape) for shape in shapes.values())
    with pytest.raises(ValueError, match="rewards, values and continues must have one shape") as error:
        compute_gae(rewards, values, continues=continues, bootstrap_value=torch.zeros(2), gamma=1.0, gae_lambda=1.0)
    assert "(2, 3)" in str(error.value)
    assert "(1, 3)" in str(error.value)


# kills: bootstrap_value's shape is not checked
@pytest.mark.parametrize("shape", [(), (3,), (1,), (2, 1)])
def test_gae_refuses_a_bootstrap_that_is_not_one_per_row(shape):
    with pytest.raises(ValueError, match=r"bootstrap_value.*\(2,\)") as error:
        compute_gae(
            torch.zeros(2, 3),
            torch.zeros(2, 3),
            continues=torch.ones(2, 3),
            bootstrap_value=torch.zeros(shape),
            gamma=1.0,
            gae_lambda=1.0,
        )
    assert str(shape) in str(error.value)


# kills: only gamma is checked against [0, 1]
@pytest.mark.parametrize(
    ("gamma", "lam"), [(1.01, 0.5), (-0.01, 0.5), (0.5, 1.01), (0.5, -0.01), (math.nan, 0.5), (0.5, math.nan)]
)
def test_gae_refuses_factors_outside_0_to_1(gamma, lam):
    with pytest.raises(ValueError, match=rf"\[0, 1\], got {gamma} and {lam}"):
        compute_gae(
            torch.zeros(2),
            torch.zeros(2),
            continues=torch.ones(2),
            bootstrap_value=torch.tensor(0.0),
            gamma=gamma,
            gae_lambda=lam,
        )


# kills: explained_variance is unexplained / variance, without the 1 -
@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ([1.0, 2.0, 3.0], 1.0),  # perfect
        ([8.0, 9.0, 10.0], 1.0),  # a constant offset is not variance
        ([5.0, 5.0, 5.0], 0.0),  # a constant explains nothing
        ([1.0, 2.0, 5.0], -1 / 3),  # errors 0 0 -2: variance 8/9 against 2/3
        ([3.0, 2.0, 1.0], -3.0),  # the wrong way round: errors -2 0 2, variance 8/3
    ],
)
def test_explained_variance_by_hand(values, expected):
    result = explained_variance(torch.tensor(values), torch.tensor([1.0, 2.0, 3.0]))
    assert_close(result, torch.tensor(expected))
    assert result.shape == ()


# kills: explained_variance swaps values and returns
def test_explained_variance_is_relative_to_the_returns():
    values, returns = torch.tensor([0.0, 4.0]), torch.tensor([0.0, 2.0])
    assert_close(explained_variance(values, returns), torch.tensor(0.0))  # 1 - 1/1; swapped it would be 1 - 1/4


# kills: the residual is computed without the mask
@pytest.mark.parametrize("seed", range(3))
def test_explained_variance_matches_plain_python(seed):
    generator = torch.Generator().manual_seed(seed)
    returns = torch.randn(4, 6, generator=generator, dtype=torch.float64)
    values = 0.5 * returns + torch.randn(4, 6, generator=generator, dtype=torch.float64)
    mask = torch.arange(6) < torch.tensor([6, 0, 2, 5])[:, None]
    target = returns[mask].tolist()
    error = [r - v for r, v in zip(target, values[mask].tolist(), strict=True)]
    expected = 1 - statistics.pvariance(error) / statistics.pvariance(target)
    assert_close(explained_variance(values, returns, mask).item(), expected)
    for garbage in GARBAGE:
        junk = torch.tensor(garbage, dtype=torch.float64)
        dirty = explained_variance(torch.where(mask, values, junk), torch.where(mask, returns, junk), mask)
        assert_close(dirty.item(), expected)


# kills: the sign of the residual's variance in the gradient (1 + unexplained / variance)
def test_explained_variance_gradient_by_hand():
    values = torch.tensor([1.0, 2.0, 5.0], requires_grad=True)
    explained_variance(values, torch.tensor([1.0, 2.0, 3.0])).backward()
    # d/dV_i = 2 (e_i - mean e) / (n Var R) with e = R - V = 0, 0, -2 and n Var R = 2
    assert_close(values.grad, torch.tensor([2 / 3, 2 / 3, -4 / 3]))


# kills: no guard for returns that do not vary (0 / 0)
@pytest.mark.parametrize("mask", [None, torch.tensor([True, True, True]), torch.tensor([False, False, False])])
def test_explained_variance_of_constant_returns_is_0(mask):
    returns = torch.tensor([2.0, 2.0, 2.0])
    assert explained_variance(torch.tensor([1.0, 5.0, -1.0]), returns, mask).item() == 0
    assert explained_variance(returns, returns, mask).item() == 0


# kills: mask=None means an empty mask
def test_explained_variance_without_a_mask_keeps_everything():
    values, returns = torch.tensor([[1.0, 2.0], [5.0, 0.0]]), torch.tensor([[1.0, 2.0], [3.0, 1.0]])
    everything = torch.ones(2, 2, dtype=torch.bool)
    assert torch.equal(explained_variance(values, returns), explained_variance(values, returns, everything))
    assert explained_variance(values, returns).item() != 0


# kills: masked_var does not compare shapes
def test_explained_variance_refuses_a_mask_of_another_shape():
    with pytest.raises(ValueError, match=r"\(2, 3\).*\(2, 1\)"):
        explained_variance(torch.zeros(2, 3), torch.zeros(2, 3), torch.ones(2, 1, dtype=torch.bool))


# kills: x is centred once and any variance above 0 counts as variation (rounding leaves about 1e-17)
@pytest.mark.parametrize(("number", "count"), [(0.1, 7), (0.3, 6), (-1.7, 3), (1000.1, 3)])
def test_explained_variance_of_any_constant_returns_is_0(number, count):
    returns = torch.full((count,), number)
    assert explained_variance(torch.arange(count).float(), returns).item() == 0


# kills: values broadcasts against returns
@pytest.mark.parametrize("shape", [(2, 1), (3,), ()])
def test_explained_variance_refuses_values_of_another_shape(shape):
    with pytest.raises(ValueError, match=r"\(2, 3\)"):
        explained_variance(torch.zeros(shape), torch.zeros(2, 3))


# kills: 0 / 0 is computed first and replaced afterwards
def test_explained_variance_of_constant_returns_has_a_finite_gradient():
    values = torch.tensor([1.0, 5.0], requires_grad=True)
    explained_variance(values, torch.tensor([2.0, 2.0])).backward()
    assert values.grad.isfinite().all()
