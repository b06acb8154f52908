"""The clipped losses, on both sides of the clip and for both signs, and the two numbers that say how far we moved."""

import math

import pytest
import torch
from torch.testing import assert_close

from rlhf_kit.functional import approx_kl, clip_fraction, clipped_policy_loss, clipped_value_loss, masked_mean

GARBAGE = [math.nan, math.inf, -math.inf, 100.0, -999.0]
OLD = -1.25  # nats; far from 0, so that forgetting the old log-probability shows


def policy_loss_and_gradient(ratio, advantage, *, clip_range):
    logprob = torch.tensor([OLD + math.log(ratio)], dtype=torch.float64, requires_grad=True)
    old, adv = torch.tensor([OLD], dtype=torch.float64), torch.tensor([advantage], dtype=torch.float64)
    loss = clipped_policy_loss(logprob, old, adv, clip_range=clip_range)
    loss.sum().backward()
    return loss.item(), logprob.grad.item()


def slow_policy_loss(logprob, old_logprob, advantage, eps):
    """Loss and d loss / d logprob, case by case: the objective is flat once it may improve no further."""
    ratio = math.exp(logprob - old_logprob)
    if advantage > 0 and ratio > 1 + eps:
        return -advantage * (1 + eps), 0.0
    if advantage < 0 and ratio < 1 - eps:
        return -advantage * (1 - eps), 0.0
    return -advantage * ratio, -advantage * ratio


def slow_value_loss(value, old_value, target, eps):
    """Loss and d loss / d value, case by case: flat where the clipped value is the one further from the target."""
    near = min(max(value, old_value - eps), old_value + eps)
    if abs(near - target) > abs(value - target):
        return (near - target) ** 2 / 2, 0.0
    return (value - target) ** 2 / 2, value - target


def random_logprobs(seed, *shape, spread=0.4):
    generator = torch.Generator().manual_seed(seed)
    old = -3 * torch.rand(*shape, generator=generator, dtype=torch.float64)
    new = old + spread * torch.randn(*shape, generator=generator, dtype=torch.float64)
    return new, old, torch.randn(*shape, generator=generator, dtype=torch.float64)


def tensor64(*numbers):
    return torch.tensor(numbers, dtype=torch.float64)


# kills: torch.minimum in place of torch.maximum
@pytest.mark.parametrize(
    ("advantage", "ratio", "loss", "gradient"),
    [
        (2.0, 0.5, -1.0, -1.0),  # less likely though good: full gradient back
        (2.0, 0.9, -1.8, -1.8),
        (2.0, 1.0, -2.0, -2.0),
        (2.0, 1.1, -2.2, -2.2),
        (2.0, 1.5, -2.4, 0.0),  # good and already likelier than 1.2: nothing more to gain
        (-2.0, 0.5, 1.6, 0.0),  # bad and already less likely than 0.8: nothing more to gain
        (-2.0, 0.9, 1.8, 1.8),
        (-2.0, 1.0, 2.0, 2.0),
        (-2.0, 1.1, 2.2, 2.2),
        (-2.0, 1.5, 3.0, 3.0),  # likelier though bad: full gradient back
        (0.0, 1.5, 0.0, 0.0),
    ],
)
def test_policy_loss_and_gradient_by_hand(advantage, ratio, loss, gradient):
    assert_close(policy_loss_and_gradient(ratio, advantage, clip_range=0.2), (loss, gradient))


# kills: the upper bound of the clip is 1 / (1 - eps)
@pytest.mark.parametrize(("ratio", "advantage", "loss"), [(3.0, 1.0, -1.3), (0.1, -1.0, 0.7)])
def test_policy_clip_bounds_are_symmetric_around_1(ratio, advantage, loss):
    assert_close(policy_loss_and_gradient(ratio, advantage, clip_range=0.3), (loss, 0.0))


# kills: the ratio is old over new
@pytest.mark.parametrize("eps", [0.1, 0.2, 0.5])
def test_policy_loss_matches_the_case_by_case_loss(eps):
    new, old, advantages = random_logprobs(0, 4, 25)
    new.requires_grad_()
    loss = clipped_policy_loss(new, old, advantages, clip_range=eps)
    loss.sum().backward()
    rows = zip(new.flatten().tolist(), old.flatten().tolist(), advantages.flatten().tolist(), strict=True)
    expected = tensor64(*[slow_policy_loss(*row, eps) for row in rows])
    assert_close(loss.flatten(), expected[:, 0])
    assert_close(new.grad.flatten(), expected[:, 1])
    assert 5 < int(new.grad.eq(0).sum()) < 95  # both regimes were visited


# kills: the loss is +A r (sign of the advantage)
def test_policy_loss_of_an_unmoved_policy_is_the_plain_policy_gradient():
    new, _, advantages = random_logprobs(1, 3, 5)
    new.requires_grad_()
    loss = clipped_policy_loss(new, new.detach().clone(), advantages, clip_range=0.2)
    loss.sum().backward()
    assert_close(loss, -advantages)
    assert_close(new.grad, -advantages)


# kills: the clipped branch is always taken (no maximum)
def test_policy_clip_far_away_is_no_clip():
    new, old, advantages = random_logprobs(2, 3, 5, spread=2.0)
    new.requires_grad_()
    loss = clipped_policy_loss(new, old, advantages, clip_range=1e6)
    loss.sum().backward()
    assert_close(loss, -advantages * (new - old).exp())
    assert_close(new.grad, loss.detach())
    tight = clipped_policy_loss(new, old, advantages, clip_range=0.2)
    assert (tight >= loss).all()  # the clip only ever makes the objective more pessimistic
    assert (tight > loss).any()


# kills: the log-ratio is not clamped before exp
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("advantage", [1.0, -1.0])
@pytest.mark.parametrize("log_ratio", [1000.0, -1000.0])
def test_extreme_policy_moves_stay_finite(log_ratio, advantage, dtype):
    logprob = torch.tensor([log_ratio], dtype=dtype, requires_grad=True)
    loss = clipped_policy_loss(
        logprob, torch.zeros(1, dtype=dtype), torch.tensor([advantage], dtype=dtype), clip_range=0.2
    )
    loss.square().sum().backward()
    assert loss.square().isfinite().all()
    assert logprob.grad.isfinite().all()
    expected = {(1000.0, 1.0): -1.2, (-1000.0, -1.0): 0.8, (-1000.0, 1.0): 0.0}
    if (log_ratio, advantage) in expected:
        assert_close(loss.item(), expected[log_ratio, advantage], atol=1e-6, rtol=0)
    else:
        assert loss.item() > 1e8  # pushed far up though bad: a huge loss, not infinity


# kills: MAX_LOG_RATIO is 1
def test_the_clamp_does_not_touch_ordinary_moves():
    for log_ratio in (-12.0, -3.0, 3.0, 12.0):
        loss, gradient = policy_loss_and_gradient(math.exp(log_ratio), -1.0, clip_range=1e9)
        assert_close((loss, gradient), (math.exp(log_ratio), math.exp(log_ratio)))


# kills: masked_sum sums padding too
@pytest.mark.parametrize("garbage", GARBAGE)
@pytest.mark.parametrize("which", ["logprobs", "old_logprobs", "advantages"])
def test_policy_loss_of_real_tokens_ignores_padding(which, garbage):
    mask = torch.tensor([[True, True, True], [True, False, False]])
    names = ("logprobs", "old_logprobs", "advantages")

    def value_and_gradient(padding):
        inputs = dict(zip(names, random_logprobs(3, 2, 3), strict=True))
        inputs[which] = torch.where(mask, inputs[which], torch.tensor(padding, dtype=torch.float64))
        inputs["logprobs"].requires_grad_()
        value = masked_mean(clipped_policy_loss(*inputs.values(), clip_range=0.2), mask)
        value.backward()
        return value.detach(), inputs["logprobs"].grad[mask]

    for got, expected in zip(value_and_gradient(garbage), value_and_gradient(0.0), strict=True):
        assert torch.equal(got, expected)
        assert got.isfinite().all()


# kills: the policy loss returns its mean
def test_losses_are_per_token():
    new, old, advantages = random_logprobs(4, 2, 3)
    assert clipped_policy_loss(new, old, advantages, clip_range=0.2).shape == (2, 3)
    assert clipped_value_loss(new, old, advantages, value_clip_range=0.2).shape == (2, 3)
    assert clipped_value_loss(new, old, advantages, value_clip_range=None).shape == (2, 3)


# kills: the policy loss detaches its unclipped branch
def test_policy_loss_gradcheck():
    new, old, advantages = random_logprobs(5, 3, 4)
    assert torch.autograd.gradcheck(
        lambda new: clipped_policy_loss(new, old, advantages, clip_range=0.2), (new.requires_grad_(),)
    )
    # gradcheck only compares code with itself, so pin the sum: minus the ratio-weighted advantages of the open tokens.
    (gradient,) = torch.autograd.grad(clipped_policy_loss(new, old, advantages, clip_range=0.2).sum(), new)
    rows = zip(new.flatten().tolist(), old.flatten().tolist(), advantages.flatten().tolist(), strict=True)
    assert_close(gradient.sum().item(), sum(slow_policy_loss(*row, 0.2)[1] for row in rows))


# kills: torch.minimum in place of torch.maximum in the value loss
@pytest.mark.parametrize(
    ("value", "target", "loss", "gradient"),
    [  # the old value is 1 and eps_v 0.2, so the clipped value lies in [0.8, 1.2]
        (1.5, 2.0, 0.32, 0.0),  # moved up towards the target by more than eps_v: no credit beyond 1.2
        (1.5, 0.0, 1.125, 1.5),  # moved up away from the target: full gradient back
        (0.5, 0.0, 0.32, 0.0),  # the same two, downwards
        (0.5, 2.0, 1.125, -1.5),
        (1.1, 2.0, 0.405, -0.9),  # inside the clip
        (1.1, 0.0, 0.605, 1.1),
        (0.9, 2.0, 0.605, -1.1),
        (0.9, 0.0, 0.405, 0.9),
        (1.0, 3.0, 2.0, -2.0),  # not moved at all
    ],
)
def test_value_loss_and_gradient_by_hand(value, target, loss, gradient):
    values = torch.tensor([value], dtype=torch.float64, requires_grad=True)
    result = clipped_value_loss(values, tensor64(1.0), tensor64(target), value_clip_range=0.2)
    result.sum().backward()
    assert_close((result.item(), values.grad.item()), (loss, gradient))


# kills: the factor 1/2 of the value loss
def test_value_loss_without_clipping_is_half_the_squared_error():
    values = torch.tensor([1.5, -2.0, 0.5], requires_grad=True)
    old, returns = torch.tensor([100.0, -100.0, 0.0]), torch.tensor([2.0, 1.0, 0.5])
    loss = clipped_value_loss(values, old, returns, value_clip_range=None)
    loss.sum().backward()
    assert_close(loss, torch.tensor([0.125, 4.5, 0.0]))
    assert_close(values.grad, torch.tensor([-0.5, -3.0, 0.0]))


# kills: the clip is around the return, not around the old value
@pytest.mark.parametrize("eps", [0.05, 0.2, 1.0])
def test_value_loss_matches_the_case_by_case_loss(eps):
    values, old, returns = random_logprobs(6, 4, 25, spread=0.6)
    values.requires_grad_()
    loss = clipped_value_loss(values, old, returns, value_clip_range=eps)
    loss.sum().backward()
    rows = zip(values.flatten().tolist(), old.flatten().tolist(), returns.flatten().tolist(), strict=True)
    expected = tensor64(*[slow_value_loss(*row, eps) for row in rows])
    assert_close(loss.flatten(), expected[:, 0])
    assert_close(values.grad.flatten(), expected[:, 1])


# kills: values clipped to +-eps_v around 0 (the old value is not added back)
def test_value_clip_far_away_or_critic_unmoved_is_no_clip():
    values, old, returns = random_logprobs(7, 3, 5)
    plain = clipped_value_loss(values, old, returns, value_clip_range=None)
    assert_close(clipped_value_loss(values, old, returns, value_clip_range=1e6), plain)
    assert_close(clipped_value_loss(values, values, returns, value_clip_range=1e-3), plain)
    assert (clipped_value_loss(values, old, returns, value_clip_range=1e-3) >= plain - 1e-12).all()


# kills: masked_mean multiplies by the mask (NaN * 0 is NaN)
@pytest.mark.parametrize("garbage", GARBAGE)
@pytest.mark.parametrize("which", [0, 1, 2])
@pytest.mark.parametrize("eps", [None, 0.2])
def test_value_loss_of_real_tokens_ignores_padding(eps, which, garbage):
    mask = torch.tensor([[True, True, True], [True, False, False]])

    def value_and_gradient(padding):
        inputs = list(random_logprobs(8, 2, 3))
        inputs[which] = torch.where(mask, inputs[which], torch.tensor(padding, dtype=torch.float64))
        inputs[0].requires_grad_()
        value = masked_mean(clipped_value_loss(*inputs, value_clip_range=eps), mask)
        value.backward()
        return value.detach(), inputs[0].grad[mask]

    for got, expected in zip(value_and_gradient(garbage), value_and_gradient(0.0), strict=True):
        assert torch.equal(got, expected)
        assert got.isfinite().all()


# kills: the value loss detaches the unclipped error
def test_value_loss_gradcheck():
    values, old, returns = random_logprobs(9, 3, 4)
    values.requires_grad_()
    for eps in (None, 0.2):
        assert torch.autograd.gradcheck(
            lambda values, eps=eps: clipped_value_loss(values, old, returns, value_clip_range=eps), (values,)
        )
    (gradient,) = torch.autograd.grad(clipped_value_loss(values, old, returns, value_clip_range=None).sum(), values)
    assert_close(gradient, values.detach() - returns)


# kills: clip_fraction compares the log-ratio with eps
def test_clip_fraction_by_hand():
    # log 0.81 = -0.21: the ratio and its logarithm disagree about leaving [0.8, 1.2].
    ratios = torch.tensor([[0.5, 0.81, 1.0, 1.1], [1.15, 1.5, 7.0, 0.01]], dtype=torch.float64)
    mask = torch.tensor([[True, True, True, True], [True, True, False, False]])
    old = torch.full_like(ratios, OLD)
    fraction = clip_fraction(old + ratios.log(), old, mask, clip_range=0.2)
    assert_close(fraction.item(), 2 / 6)  # 0.5 and 1.5
    assert fraction.shape == ()


# kills: clip_fraction counts one side only (no abs)
@pytest.mark.parametrize(("ratio", "outside"), [(0.5, 1.0), (0.79, 1.0), (0.81, 0.0), (1.19, 0.0), (1.21, 1.0)])
def test_clip_fraction_counts_both_sides(ratio, outside):
    new = torch.tensor([OLD + math.log(ratio)])
    assert clip_fraction(new, torch.tensor([OLD]), torch.tensor([True]), clip_range=0.2).item() == outside


# kills: clip_fraction uses >= in place of >
def test_a_ratio_on_the_bound_has_not_left_the_range():
    ratios = tensor64(0.5, 1.5)
    assert torch.equal(ratios.log().exp(), ratios)  # the example is exact, so the comparison is
    assert clip_fraction(ratios.log(), tensor64(0, 0), torch.tensor([True, True]), clip_range=0.5).item() == 0


# kills: clip_fraction is the share over all slots, padding included
@pytest.mark.parametrize("garbage", GARBAGE)
def test_statistics_ignore_padding(garbage):
    new, old, _ = random_logprobs(10, 4, 6)
    mask = torch.arange(6) < torch.tensor([6, 0, 2, 5])[:, None]
    junk = torch.tensor(garbage, dtype=torch.float64)
    ratios = (new - old)[mask].exp().tolist()
    share = sum(not 0.8 <= r <= 1.2 for r in ratios) / len(ratios)
    kl = sum(r - 1 - math.log(r) for r in ratios) / len(ratios)
    for dirty_new, dirty_old in [(torch.where(mask, new, junk), old), (new, torch.where(mask, old, junk))]:
        assert_close(clip_fraction(dirty_new, dirty_old, mask, clip_range=0.2).item(), share)
        assert_close(approx_kl(dirty_new, dirty_old, mask).item(), kl)


# kills: masked_mean of nothing is NaN
def test_statistics_of_nothing_are_0():
    nan = torch.full((2, 3), math.nan, requires_grad=True)
    nothing = torch.zeros(2, 3, dtype=torch.bool)
    assert clip_fraction(nan, nan, nothing, clip_range=0.2).item() == 0
    assert approx_kl(nan, nan, nothing).item() == 0


# kills: approx_kl is 1 - r - log r
def test_approx_kl_by_hand():
    new = torch.tensor([OLD + math.log(2.0), OLD + math.log(0.5), 40.0], dtype=torch.float64, requires_grad=True)
    kl = approx_kl(new, torch.full_like(new, OLD), torch.tensor([True, True, False]))
    kl.backward()
    assert_close(kl.item(), ((2 - 1 - math.log(2)) + (0.5 - 1 + math.log(2))) / 2)
    assert_close(new.grad, tensor64(1.0 / 2, -0.5 / 2, 0.0))  # (r - 1) / n


# kills: approx_kl estimates KL(new || old)
def test_approx_kl_averages_to_the_divergence_of_new_from_old():
    old_probabilities, new_probabilities = [4 / 8, 2 / 8, 1 / 8, 1 / 8], [0.1, 0.2, 0.3, 0.4]
    draws = [0, 0, 0, 0, 1, 1, 2, 3]  # every token as often as the old policy draws it
    new = tensor64(*[math.log(new_probabilities[token]) for token in draws])
    old = tensor64(*[math.log(old_probabilities[token]) for token in draws])
    exact = sum(p * math.log(p / q) for p, q in zip(old_probabilities, new_probabilities, strict=True))
    other_way = sum(q * math.log(q / p) for p, q in zip(old_probabilities, new_probabilities, strict=True))
    assert abs(exact - other_way) > 0.02
    assert_close(approx_kl(new, old, torch.ones(8)).item(), exact)


# kills: exp(x) - 1 in place of expm1(x)
@pytest.mark.parametrize("log_ratio", [1e-3, -1e-3])
def test_approx_kl_keeps_its_digits_near_0(log_ratio):
    kl = approx_kl(torch.tensor([log_ratio]), torch.tensor([0.0]), torch.tensor([True]))
    assert_close(kl.item(), log_ratio**2 / 2 + log_ratio**3 / 6, rtol=1e-3, atol=0)


# kills: approx_kl without its linear term (r - 1 alone)
def test_approx_kl_is_never_negative_and_0_only_without_a_move():
    generator = torch.Generator().manual_seed(0)
    scales = 2.0 ** torch.arange(-30, 4)
    moves = (torch.randn(200, 1, generator=generator) * scales).flatten()
    for move in moves.split(100):
        assert approx_kl(move, torch.zeros_like(move), torch.ones_like(move)).item() >= 0
    new, _, _ = random_logprobs(11, 3, 5)
    assert approx_kl(new, new.clone(), torch.ones(3, 5)).item() == 0
    assert clip_fraction(new, new.clone(), torch.ones(3, 5), clip_range=1e-9).item() == 0


# kills: approx_kl does not clamp the log-ratio before exp
@pytest.mark.parametrize("log_ratio", [1000.0, -1000.0])
def test_statistics_of_extreme_moves_stay_finite(log_ratio):
    new = torch.tensor([log_ratio], requires_grad=True)
    kl = approx_kl(new, torch.zeros(1), torch.tensor([True]))
    kl.backward()
    assert math.isfinite(kl.item())
    assert kl.item() > 10
    assert new.grad.isfinite().all()
    assert clip_fraction(new, torch.zeros(1), torch.tensor([True]), clip_range=0.2).item() == 1


# kills: clip ranges of 0 pass (< 0 in place of <= 0)
@pytest.mark.parametrize("eps", [0, 0.0, -0.2])
def test_clip_ranges_that_are_not_positive_are_refused(eps):
    x, mask = torch.zeros(2), torch.tensor([True, True])
    with pytest.raises(ValueError, match=rf"clip_range must be above 0, got {eps}\."):
        clipped_policy_loss(x, x, x, clip_range=eps)
    with pytest.raises(ValueError, match=rf"clip_range must be above 0, got {eps}\."):
        clip_fraction(x, x, mask, clip_range=eps)
    with pytest.raises(ValueError, match=rf"value_clip_range must be above 0, or None.*got {eps}\."):
        clipped_value_loss(x, x, x, value_clip_range=eps)


# kills: _check_same_shape compares nothing (shapes that broadcast would pass)
@pytest.mark.parametrize("position", [0, 1, 2])
@pytest.mark.parametrize(
    "function",
    [
        lambda *x: clipped_policy_loss(*x, clip_range=0.2),
        lambda *x: clipped_value_loss(*x, value_clip_range=0.2),
        lambda *x: clipped_value_loss(*x, value_clip_range=None),
        lambda *x: clip_fraction(*x, clip_range=0.2),
        approx_kl,
    ],
    ids=["policy", "value", "value without clip", "clip_fraction", "approx_kl"],
)
def test_shapes_that_differ_are_refused_by_name(function, position):
    inputs = [torch.zeros(2, 3) for _ in range(3)]
    inputs[position] = torch.zeros(2, 1)
    with pytest.raises(ValueError, match=r"shapes must be equal") as error:
        function(*inputs)
    assert "(2, 3)" in str(error.value)
    assert "(2, 1)" in str(error.value)


# kills: the linear term of approx_kl is clamped together with its exponential
@pytest.mark.parametrize("log_ratio", [-25.0, -1000.0])
def test_approx_kl_of_a_large_move_follows_its_formula(log_ratio):
    new = torch.tensor([log_ratio], requires_grad=True)
    kl = approx_kl(new, torch.zeros(1), torch.tensor([True]))
    kl.backward()
    assert_close(kl.item(), -1 - log_ratio)
    assert_close(new.grad.tolist(), [-1.0])


# kills: masked_mean divides by x.numel() in place of the number kept
@pytest.mark.parametrize("loss", ["policy", "value", "value without clip"])
@pytest.mark.parametrize("garbage", [math.nan, math.inf])
def test_padding_replaced_before_the_call_stays_out_of_the_weights(loss, garbage):
    weight = torch.tensor(0.1, requires_grad=True)
    predicted, old = weight * torch.ones(2), torch.zeros(2)
    mask = torch.tensor([True, False])
    target = torch.where(mask, torch.tensor([1.0, garbage]), 0.0)
    per_token = {
        "policy": lambda: clipped_policy_loss(predicted, old, target, clip_range=0.2),
        "value": lambda: clipped_value_loss(predicted, old, target, value_clip_range=0.2),
        "value without clip": lambda: clipped_value_loss(predicted, old, target, value_clip_range=None),
    }[loss]()
    masked_mean(per_token, mask).backward()
    # Only the first token counts: -A r of the policy, V - R of the value.
    assert_close(weight.grad.item(), -math.exp(0.1) if loss == "policy" else 0.1 - 1.0, atol=1e-6, rtol=0)
