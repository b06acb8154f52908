"""KL estimators by exact enumeration of a small vocabulary, the exact sum, and the reward built from them."""

import math

import pytest
import torch
from torch.distributions import Categorical, kl_divergence
from torch.testing import assert_close

from rlhf_kit.functional import estimate_kl, full_kl, kl_shaped_rewards

GARBAGE = [math.nan, math.inf, -math.inf, 100.0, -999.0]
ESTIMATORS = ["k1", "k2", "k3"]
POLICY_LOGITS = [0.3, -1.2, 2.0, 0.1, -0.4]
REFERENCE_LOGITS = [1.0, 0.5, -0.3, 0.8, -2.0]


def policy(*, requires_grad=False):
    return torch.tensor(POLICY_LOGITS, dtype=torch.float64, requires_grad=requires_grad)


def reference():
    return torch.tensor(REFERENCE_LOGITS, dtype=torch.float64)


def softmax(logits):
    weights = [math.exp(z) if z > -math.inf else 0.0 for z in logits]
    return [w / math.fsum(weights) for w in weights]


def slow_kl(p, q):
    return math.fsum(a * math.log(a / b) for a, b in zip(p, q, strict=True) if a > 0)


def slow_kl_gradient(p, q):
    """d KL(p || q) / d logits of p."""
    total = slow_kl(p, q)
    return [a * (math.log(a / b) - total) if a > 0 else 0.0 for a, b in zip(p, q, strict=True)]


def expected_gradient(estimator):
    """Gradient of the estimator as a loss, averaged exactly over the tokens the policy draws (drawing is fixed)."""
    logits = policy(requires_grad=True)
    logprobs = logits.log_softmax(-1)
    loss = estimate_kl(logprobs, reference().log_softmax(-1), estimator)
    (logprobs.exp().detach() * loss).sum().backward()
    return logits.grad


# kills: k1 is ref - log pi
@pytest.mark.parametrize(
    ("estimator", "values", "gradients"),
    [
        ("k1", [math.log(2), -math.log(2), 0.0], [1.0, 1.0, 1.0]),
        ("k2", [math.log(2) ** 2 / 2, math.log(2) ** 2 / 2, 0.0], [math.log(2), -math.log(2), 0.0]),
        ("k3", [0.5 - 1 + math.log(2), 2 - 1 - math.log(2), 0.0], [0.5, -1.0, 0.0]),  # gradient 1 - exp(-k1)
    ],
)
def test_estimators_and_gradients_by_hand(estimator, values, gradients):
    logprobs = torch.tensor([0.5, 0.25, 0.4], dtype=torch.float64).log().requires_grad_()
    ref_logprobs = torch.tensor([0.25, 0.5, 0.4], dtype=torch.float64).log()
    kl = estimate_kl(logprobs, ref_logprobs, estimator)
    kl.sum().backward()
    assert_close(kl, torch.tensor(values, dtype=torch.float64))
    assert_close(logprobs.grad, torch.tensor(gradients, dtype=torch.float64))


# kills: k2 without the factor 1/2
@pytest.mark.parametrize("seed", range(3))
def test_estimators_match_plain_python(seed):
    generator = torch.Generator().manual_seed(seed)
    logprobs, ref_logprobs = (-4 * torch.rand(3, 7, generator=generator, dtype=torch.float64) for _ in range(2))
    gaps = [a - b for a, b in zip(logprobs.flatten().tolist(), ref_logprobs.flatten().tolist(), strict=True)]
    formulas = {
        "k1": lambda gap: gap,
        "k2": lambda gap: gap * gap / 2,
        "k3": lambda gap: 1 / math.exp(gap) - 1 + gap,
    }
    for name, formula in formulas.items():
        expected = torch.tensor([formula(gap) for gap in gaps], dtype=torch.float64).reshape(3, 7)
        assert_close(estimate_kl(logprobs, ref_logprobs, name), expected)


# kills: k3 is exp(k1) - 1 - k1 (the other direction)
@pytest.mark.parametrize("estimator", ["k1", "k3"])
def test_k1_and_k3_are_unbiased(estimator):
    p, q = softmax(POLICY_LOGITS), softmax(REFERENCE_LOGITS)
    assert abs(slow_kl(p, q) - slow_kl(q, p)) > 0.1  # the direction matters
    logprobs, ref_logprobs = policy().log_softmax(-1), reference().log_softmax(-1)
    average = (logprobs.exp() * estimate_kl(logprobs, ref_logprobs, estimator)).sum()
    assert_close(average.item(), slow_kl(p, q))
    assert_close(average, full_kl(policy(), reference()))


# kills: k3 drops its + k1 term
def test_k2_and_k3_are_never_negative_and_k1_may_be():
    generator = torch.Generator().manual_seed(0)
    scales = 2.0 ** torch.arange(-30, 4)
    gaps = (torch.randn(2000, 1, generator=generator) * scales).flatten()
    zeros = torch.zeros_like(gaps)
    assert (estimate_kl(gaps, zeros, "k1") < 0).any()
    assert (estimate_kl(gaps, zeros, "k2") >= 0).all()
    assert (estimate_kl(gaps, zeros, "k3") >= 0).all()


# kills: exp(-k1) - 1 in place of expm1(-k1)
@pytest.mark.parametrize("gap", [1e-3, -1e-3])
def test_k3_keeps_its_digits_near_0(gap):
    kl = estimate_kl(torch.tensor([gap]), torch.tensor([0.0]), "k3")
    assert_close(kl.item(), gap**2 / 2 - gap**3 / 6, rtol=1e-3, atol=0)


# kills: k3 is exp(-k1) + k1, without the - 1
@pytest.mark.parametrize("estimator", ESTIMATORS)
def test_equal_policies_have_no_kl_and_k2_k3_no_gradient(estimator):
    logprobs = torch.tensor([-0.1, -2.0, -30.0], requires_grad=True)
    kl = estimate_kl(logprobs, logprobs.detach().clone(), estimator)
    kl.sum().backward()
    assert kl.tolist() == [0, 0, 0]
    assert logprobs.grad.tolist() == ([1, 1, 1] if estimator == "k1" else [0, 0, 0])


# kills: k1 as a loss is squared (it would pull)
def test_k1_as_a_loss_has_no_expected_gradient():
    assert_close(expected_gradient("k1"), torch.zeros(5, dtype=torch.float64))


# kills: k2 detaches its gap
def test_k2_as_a_loss_has_the_gradient_of_the_full_kl():
    by_hand = torch.tensor(slow_kl_gradient(softmax(POLICY_LOGITS), softmax(REFERENCE_LOGITS)), dtype=torch.float64)
    assert_close(expected_gradient("k2"), by_hand)
    logits = policy(requires_grad=True)
    full_kl(logits, reference()).backward()
    assert_close(expected_gradient("k2"), logits.grad)


# kills: k3 as a loss detaches the exponential
def test_k3_as_a_loss_follows_the_kl_of_the_other_direction():
    # KL(ref || pi) has gradient pi - ref in the logits of pi.
    p, q = softmax(POLICY_LOGITS), softmax(REFERENCE_LOGITS)
    by_hand = torch.tensor([a - b for a, b in zip(p, q, strict=True)], dtype=torch.float64)
    assert_close(expected_gradient("k3"), by_hand)
    logits = policy(requires_grad=True)
    kl_divergence(Categorical(logits=reference()), Categorical(logits=logits)).backward()
    assert_close(expected_gradient("k3"), logits.grad)
    assert (expected_gradient("k3") - expected_gradient("k2")).abs().max() > 0.1


# kills: k3 does not clamp its gap before exp
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("gap", [1000.0, -1000.0])
@pytest.mark.parametrize("estimator", ESTIMATORS)
def test_extreme_gaps_stay_finite(estimator, gap, dtype):
    logprobs = torch.tensor([gap], dtype=dtype, requires_grad=True)
    kl = estimate_kl(logprobs, torch.zeros(1, dtype=dtype), estimator)
    kl.sum().backward()
    assert kl.isfinite().all()
    assert logprobs.grad.isfinite().all()
    assert kl.abs().item() > 10


# kills: k1 and k2 are clamped like k3
def test_k1_and_k2_of_extreme_gaps_are_exact():
    gaps, zeros = torch.tensor([1000.0, -1000.0], requires_grad=True), torch.zeros(2)
    assert estimate_kl(gaps, zeros, "k1").tolist() == [1000, -1000]
    k2 = estimate_kl(gaps, zeros, "k2")
    k2.sum().backward()
    assert k2.tolist() == [500_000, 500_000]
    assert gaps.grad.tolist() == [1000, -1000]


# kills: the gap clamp of k3 is at 1 nat
@pytest.mark.parametrize("gap", [-12.0, -3.0, 3.0, 12.0])
def test_the_clamp_does_not_touch_ordinary_gaps(gap):
    kl = estimate_kl(torch.tensor([gap], dtype=torch.float64), torch.zeros(1, dtype=torch.float64), "k3")
    assert_close(kl.item(), math.exp(-gap) - 1 + gap)


# kills: estimate_kl without the shape check (ref_logprobs would broadcast)
@pytest.mark.parametrize("estimator", ESTIMATORS)
def test_estimators_refuse_shapes_that_differ(estimator):
    with pytest.raises(ValueError, match=r"\(2, 3\).*\(2, 1\)"):
        estimate_kl(torch.zeros(2, 3), torch.zeros(2, 1), estimator)


# kills: an unknown estimator falls back to k3
@pytest.mark.parametrize("estimator", ["full", "K1", "", None])
def test_unknown_estimators_are_refused_by_name(estimator):
    with pytest.raises(ValueError, match=rf'"k1", "k2" or "k3".*got {estimator!r}'):
        estimate_kl(torch.zeros(2), torch.zeros(2), estimator)


# kills: full_kl weighs with the reference's probabilities
def test_full_kl_and_gradient_by_hand():
    # p = 3/4, 1/4 and q = 1/2, 1/2: KL = 3/4 log 3/2 + 1/4 log 1/2; its gradient in the logits is +-p1 p2 log 3.
    logits = torch.tensor([[math.log(3.0), 0.0]], dtype=torch.float64, requires_grad=True)
    kl = full_kl(logits, torch.zeros(1, 2, dtype=torch.float64))
    kl.sum().backward()
    assert_close(kl.tolist(), [0.75 * math.log(1.5) + 0.25 * math.log(0.5)])
    assert_close(logits.grad.tolist(), [[3 / 16 * math.log(3), -3 / 16 * math.log(3)]])


# kills: full_kl is KL(reference || policy)
@pytest.mark.parametrize("seed", range(3))
def test_full_kl_matches_plain_python_and_torch(seed):
    generator = torch.Generator().manual_seed(seed)
    logits, ref_logits = (3 * torch.randn(2, 3, 6, generator=generator, dtype=torch.float64) for _ in range(2))
    logits.requires_grad_()
    kl = full_kl(logits, ref_logits)
    kl.sum().backward()
    rows = [
        (softmax(a), softmax(b))
        for a, b in zip(logits.reshape(-1, 6).tolist(), ref_logits.reshape(-1, 6).tolist(), strict=True)
    ]
    assert kl.shape == (2, 3)
    assert_close(kl.flatten().tolist(), [slow_kl(p, q) for p, q in rows])
    assert_close(logits.grad.reshape(-1, 6).tolist(), [slow_kl_gradient(p, q) for p, q in rows])
    assert_close(kl, kl_divergence(Categorical(logits=logits), Categorical(logits=ref_logits)))


# kills: full_kl uses the logits as they are, without log_softmax
def test_full_kl_sees_probabilities_not_logits():
    logits, ref_logits = policy(), reference()
    assert_close(full_kl(logits + 7, ref_logits - 40), full_kl(logits, ref_logits))
    assert_close(full_kl(logits, logits + 3).item(), 0.0)


# kills: full_kl sums the absolute value of each term
def test_full_kl_of_nearly_equal_policies_is_about_0():
    generator = torch.Generator().manual_seed(0)
    logits = 30 * torch.randn(200, 50, generator=generator)
    kl = full_kl(logits, logits + 1e-3 * torch.randn(200, 50, generator=generator))
    assert kl.min() > -1e-5  # "at least 0 up to rounding"
    assert kl.max() < 1e-5


# kills: a token impossible under the policy gives 0 * inf
@pytest.mark.parametrize("ref_tail", [-math.inf, 0.5, -1000.0])
def test_full_kl_of_impossible_tokens_is_finite(ref_tail):
    logits = torch.tensor([1.0, 0.0, -math.inf], dtype=torch.float64, requires_grad=True)
    ref_logits = torch.tensor([0.0, 2.0, ref_tail], dtype=torch.float64)
    kl = full_kl(logits, ref_logits)
    kl.backward()
    p, q = softmax([1.0, 0.0, -math.inf]), softmax([0.0, 2.0, ref_tail])
    assert_close(kl.item(), slow_kl(p, q))
    assert_close(logits.grad.tolist(), slow_kl_gradient(p, q))


# kills: an impossible reference token is skipped too (infinite KL would read as small)
def test_full_kl_is_infinite_where_only_the_reference_is_impossible():
    assert full_kl(torch.tensor([0.0, 0.0]), torch.tensor([0.0, -math.inf])).item() == math.inf


# kills: full_kl takes the logarithm of a softmax (log 0 for far tails)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_full_kl_of_extreme_logits_stays_finite(dtype):
    logits = torch.tensor([[0.0, -1000.0], [1000.0, 0.0], [1000.0, -1000.0]], dtype=dtype, requires_grad=True)
    ref_logits = torch.tensor([[-1000.0, 0.0], [1000.0, 0.0], [0.0, 0.0]], dtype=dtype)
    kl = full_kl(logits, ref_logits)
    kl.sum().backward()
    assert_close(kl, torch.tensor([1000.0, 0.0, math.log(2)], dtype=dtype))
    assert_close(logits.grad, torch.zeros(3, 2, dtype=dtype))


# kills: full_kl computes in the dtype of the logits
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_full_kl_of_half_precision_logits_is_computed_in_float32(dtype):
    generator = torch.Generator().manual_seed(0)
    logits, ref_logits = ((3 * torch.randn(4, 100, generator=generator)).to(dtype) for _ in range(2))
    kl = full_kl(logits, ref_logits)
    assert kl.dtype == torch.float32
    assert_close(kl, full_kl(logits.double(), ref_logits.double()).float())


# kills: full_kl casts float64 down to float32
def test_full_kl_gradcheck_in_float64():
    generator = torch.Generator().manual_seed(1)
    logits, ref_logits = (torch.randn(2, 4, generator=generator, dtype=torch.float64) for _ in range(2))
    assert full_kl(logits, ref_logits).dtype == torch.float64
    assert torch.autograd.gradcheck(full_kl, (logits.requires_grad_(), ref_logits.requires_grad_()))


# kills: full_kl without the shape check (one reference row for all would pass)
def test_full_kl_refuses_shapes_that_differ():
    with pytest.raises(ValueError, match=r"\(2, 5\).*\(1, 5\)"):
        full_kl(torch.zeros(2, 5), torch.zeros(1, 5))


# kills: the KL is added to the reward (sign of the penalty)
def test_shaped_rewards_by_hand():
    rewards = kl_shaped_rewards(
        torch.tensor([2.0, -1.0, 5.0]),
        torch.tensor([[0.5, -0.25, 1.0], [2.0, 9.0, 9.0], [9.0, 9.0, 9.0]]),
        torch.tensor([[True, True, True], [True, False, False], [False, False, False]]),
        kl_coef=0.4,
    )
    assert_close(rewards, torch.tensor([[-0.2, 0.1, 1.6], [-1.8, 0.0, 0.0], [0.0, 0.0, 0.0]]))


# kills: the score lands on the last column in place of the last real token
@pytest.mark.parametrize("seed", range(3))
def test_shaped_rewards_match_a_plain_loop(seed):
    generator = torch.Generator().manual_seed(seed)
    scores = torch.randn(7, generator=generator, dtype=torch.float64)
    kl = torch.randn(7, 6, generator=generator, dtype=torch.float64)
    lengths = torch.arange(7)  # 0 to 6
    expected = torch.zeros(7, 6, dtype=torch.float64)
    for row, length in enumerate(lengths.tolist()):
        for t in range(length):
            expected[row, t] = -0.05 * kl[row, t].item() + (scores[row].item() if t == length - 1 else 0.0)
    mask = torch.arange(6) < lengths[:, None]
    assert_close(kl_shaped_rewards(scores, kl, mask, kl_coef=0.05), expected)
    assert_close(kl_shaped_rewards(scores, kl, mask.long(), kl_coef=0.05), expected)
    assert_close(kl_shaped_rewards(scores, kl, mask.double(), kl_coef=0.05), expected)


# kills: the penalty in padding is not zeroed
@pytest.mark.parametrize("garbage", GARBAGE)
def test_shaped_rewards_ignore_padding(garbage):
    mask = torch.tensor([[True, True, False], [False, False, False]])
    kl = torch.tensor([[1.0, 2.0, garbage], [garbage] * 3], requires_grad=True)
    rewards = kl_shaped_rewards(torch.tensor([3.0, garbage]), kl, mask, kl_coef=0.1)
    rewards.sum().backward()
    assert_close(rewards, torch.tensor([[-0.1, 2.8, 0.0], [0.0, 0.0, 0.0]]))
    assert_close(kl.grad, torch.tensor([[-0.1, -0.1, 0.0], [0.0, 0.0, 0.0]]))


# kills: the score is paid on every real token
def test_a_row_of_shaped_rewards_adds_up_to_score_minus_penalty():
    generator = torch.Generator().manual_seed(0)
    scores, kl = torch.randn(4, generator=generator), torch.randn(4, 5, generator=generator)
    rewards = kl_shaped_rewards(scores, kl, torch.ones(4, 5, dtype=torch.bool), kl_coef=0.3)
    assert_close(rewards.sum(1), scores - 0.3 * kl.sum(1))


# kills: kl_coef is applied to the score too
def test_without_kl_coef_only_the_score_remains():
    mask = torch.tensor([[True, True, False], [True, False, False]])
    rewards = kl_shaped_rewards(torch.tensor([3.0, 4.0]), torch.full((2, 3), 7.0), mask, kl_coef=0.0)
    assert_close(rewards, torch.tensor([[0.0, 3.0, 0.0], [4.0, 0.0, 0.0]]))


# kills: the gradient of kl is cut by a detach
def test_shaped_rewards_gradient_reaches_scores_and_kl():
    scores, kl = torch.tensor([2.0, -1.0], requires_grad=True), torch.zeros(2, 3, requires_grad=True)
    mask = torch.tensor([[True, True, True], [True, False, False]])
    weights = torch.tensor([[1.0, 2.0, 4.0], [8.0, 16.0, 32.0]])
    (kl_shaped_rewards(scores, kl, mask, kl_coef=0.5) * weights).sum().backward()
    assert_close(scores.grad, torch.tensor([4.0, 8.0]))
    assert_close(kl.grad, torch.tensor([[-0.5, -1.0, -2.0], [-4.0, 0.0, 0.0]]))


# kills: the shape of scores is not checked (one score for all rows would broadcast)
@pytest.mark.parametrize("shape", [(), (1,), (3,), (2, 1)])
def test_shaped_rewards_refuse_scores_that_are_not_one_per_row(shape):
    with pytest.raises(ValueError, match=r"scores must have shape \(2,\)") as error:
        kl_shaped_rewards(torch.zeros(shape), torch.zeros(2, 3), torch.ones(2, 3), kl_coef=0.1)
    assert str(shape) in str(error.value)


# kills: kl and completion_mask are not compared
def test_shaped_rewards_refuse_a_mask_of_another_shape():
    with pytest.raises(ValueError, match=r"\(2, 3\).*\(2, 1\)"):
        kl_shaped_rewards(torch.zeros(2), torch.zeros(2, 3), torch.ones(2, 1), kl_coef=0.1)


# kills: the linear term of k3 is clamped together with its exponential
@pytest.mark.parametrize("gap", [25.0, 1000.0])
def test_k3_of_a_large_gap_follows_its_formula(gap):
    logprobs = torch.tensor([gap], requires_grad=True)
    kl = estimate_kl(logprobs, torch.zeros(1), "k3")
    kl.sum().backward()
    assert_close(kl.tolist(), [gap - 1])
    assert_close(logprobs.grad.tolist(), [1.0])


# kills: kl of shape (T,) with T scores passes and gives (T, T)
def test_shaped_rewards_refuse_kl_that_is_not_batched():
    with pytest.raises(ValueError, match=r"\(2,\)"):
        kl_shaped_rewards(torch.zeros(2), torch.zeros(2), torch.ones(2), kl_coef=0.1)
