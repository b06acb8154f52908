"""masked_sum, masked_mean, masked_var, masked_whiten against hand-computed numbers and a loop in plain Python."""

import math

import pytest
import torch
from torch.testing import assert_close

from rlhf_kit.functional import masked_mean, masked_sum, masked_var, masked_whiten

ALL = [masked_sum, masked_mean, masked_var, masked_whiten]
GARBAGE = [math.nan, math.inf, -math.inf, 100.0, -999.0]

# Kept: 1, 2, 4, 7. Sum 14, mean 3.5, squared deviations 6.25 + 2.25 + 0.25 + 12.25 = 21, biased variance 5.25.
X = [[1.0, 2.0, 4.0], [7.0, 50.0, -60.0]]
MASK = [[True, True, True], [True, False, False]]


def example(*, dtype=torch.float32, requires_grad=False):
    return torch.tensor(X, dtype=dtype, requires_grad=requires_grad), torch.tensor(MASK)


def ragged(seed, rows=6, columns=7):
    """Random rows of length 0 to `columns`, the first one empty and the second one full."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(rows, columns, generator=generator, dtype=torch.float64) * 3 + 2
    lengths = torch.randint(0, columns + 1, (rows,), generator=generator)
    lengths[0], lengths[1] = 0, columns
    return x, torch.arange(columns) < lengths[:, None]


def kept_floats(x, mask):
    return [v for v, keep in zip(x.flatten().tolist(), mask.flatten().tolist(), strict=True) if keep]


def slow_moments(numbers):
    if not numbers:
        return 0.0, 0.0, 0.0
    total = math.fsum(numbers)
    mean = total / len(numbers)
    return total, mean, math.fsum((v - mean) ** 2 for v in numbers) / len(numbers)


# kills: masked_sum returns x.sum(), padding included
def test_sum_and_its_gradient_by_hand():
    x, mask = example(requires_grad=True)
    total = masked_sum(x, mask)
    total.backward()
    assert_close(total, torch.tensor(14.0))
    assert_close(x.grad, torch.tensor([[1.0, 1.0, 1.0], [1.0, 0.0, 0.0]]))


# kills: masked_mean divides by x.numel() in place of the number kept
def test_mean_and_its_gradient_by_hand():
    x, mask = example(requires_grad=True)
    mean = masked_mean(x, mask)
    mean.backward()
    assert_close(mean, torch.tensor(3.5))
    assert_close(x.grad, torch.tensor([[0.25, 0.25, 0.25], [0.25, 0.0, 0.0]]))


# kills: masked_var divides by n - 1
def test_var_and_its_gradient_by_hand():
    x, mask = example(requires_grad=True)
    var = masked_var(x, mask)
    var.backward()
    assert_close(var, torch.tensor(5.25))
    # d var / d x_i = 2 (x_i - mean) / n
    assert_close(x.grad, torch.tensor([[-1.25, -0.75, 0.25], [1.75, 0.0, 0.0]]))


# kills: masked_whiten detaches the mean
def test_whiten_and_its_gradient_by_hand():
    x, mask = example(requires_grad=True)
    white = masked_whiten(x, mask)
    sd = math.sqrt(5.25)
    assert_close(white, torch.tensor([[-2.5 / sd, -1.5 / sd, 0.5 / sd], [3.5 / sd, 0.0, 0.0]]))
    # d w_0 / d x_j = ([j = 0] - 1/n - w_0 w_j / n) / sd, here with w_0 w_j = (x_0 - 3.5)(x_j - 3.5) / 5.25.
    white[0, 0].backward()
    by_hand = [(float(j == 0) - 0.25 - (-2.5) * d / 5.25 / 4) / sd for j, d in enumerate([-2.5, -1.5, 0.5, 3.5])]
    assert_close(x.grad, torch.tensor([by_hand[:3], [by_hand[3], 0.0, 0.0]]))


# kills: masked_whiten detaches the variance
def test_whiten_gradient_is_orthogonal_to_scale():
    x, mask = example(dtype=torch.float64, requires_grad=True)
    weights = torch.tensor([[0.3, -1.0, 2.0], [0.5, 9.0, 9.0]], dtype=torch.float64)
    (masked_whiten(x, mask) * weights).sum().backward()
    # Shifting or scaling every kept x changes no whitened value, so the gradient has no part along 1 or along x.
    assert_close(x.grad.sum(), torch.zeros((), dtype=torch.float64), atol=1e-9, rtol=0)
    assert_close((x.grad * x.detach() * mask).sum(), torch.zeros((), dtype=torch.float64), atol=1e-8, rtol=0)
    assert x.grad[mask].abs().min() > 1e-3


# kills: masked_sum ignores dim and sums everything
@pytest.mark.parametrize(
    ("dim", "sums", "means"),
    [(0, [8.0, 2.0, 4.0], [4.0, 2.0, 4.0]), (1, [7.0, 7.0], [7 / 3, 7.0]), (-1, [7.0, 7.0], [7 / 3, 7.0])],
)
def test_sum_and_mean_along_one_axis(dim, sums, means):
    x, mask = example()
    assert_close(masked_sum(x, mask, dim=dim), torch.tensor(sums))
    assert_close(masked_mean(x, mask, dim=dim), torch.tensor(means))


# kills: masked_mean along an axis divides by the number kept overall
def test_mean_along_an_axis_weighs_rows_equally():
    x, mask = example(requires_grad=True)
    masked_mean(x, mask, dim=1).sum().backward()
    assert_close(x.grad, torch.tensor([[1 / 3, 1 / 3, 1 / 3], [1.0, 0.0, 0.0]]))


# kills: masked_var is E[x^2] - E[x]
@pytest.mark.parametrize("seed", range(5))
def test_moments_match_a_plain_loop(seed):
    x, mask = ragged(seed)
    total, mean, var = slow_moments(kept_floats(x, mask))
    assert_close(masked_sum(x, mask).item(), total)
    assert_close(masked_mean(x, mask).item(), mean)
    assert_close(masked_var(x, mask).item(), var)
    for row, row_mask, row_sum, row_mean in zip(
        x, mask, masked_sum(x, mask, dim=1).tolist(), masked_mean(x, mask, dim=1).tolist(), strict=True
    ):
        total, mean, _ = slow_moments(kept_floats(row, row_mask))
        assert_close(row_sum, total)
        assert_close(row_mean, mean)


# kills: masked_whiten divides by the variance in place of its square root
@pytest.mark.parametrize("seed", range(5))
def test_whiten_matches_a_plain_loop(seed):
    x, mask = ragged(seed)
    _, mean, var = slow_moments(kept_floats(x, mask))
    expected = [
        [(v - mean) / math.sqrt(var + 1e-8) if keep else 0.0 for v, keep in zip(row, keeps, strict=True)]
        for row, keeps in zip(x.tolist(), mask.tolist(), strict=True)
    ]
    assert_close(masked_whiten(x, mask), torch.tensor(expected, dtype=torch.float64))


# kills: masked_whiten does not centre
def test_whitened_numbers_have_mean_0_and_variance_1_and_padding_is_0():
    x, mask = ragged(11)
    white = masked_whiten(x, mask)
    _, mean, var = slow_moments(kept_floats(white, mask))
    assert abs(mean) < 1e-12
    assert abs(var - 1) < 1e-7
    assert white[~mask].eq(0).all()
    assert_close(masked_whiten(3 * x + 5, mask), white, atol=1e-7, rtol=0)


# kills: WHITEN_EPS is 0
def test_whiten_adds_eps_to_the_variance():
    x = torch.tensor([1e-4, -1e-4], dtype=torch.float64)  # variance 1e-8, the same as eps
    white = masked_whiten(x, torch.tensor([True, True]))
    assert_close(white, torch.tensor([math.sqrt(0.5), -math.sqrt(0.5)], dtype=torch.float64))


# kills: masked_mean without clamp(min=1) on the count
@pytest.mark.parametrize("function", ALL)
@pytest.mark.parametrize("content", [0.0, 5.0, math.nan, math.inf])
def test_an_empty_mask_gives_0_and_no_gradient(function, content):
    x = torch.full((2, 3), content, requires_grad=True)
    result = function(x, torch.zeros(2, 3, dtype=torch.bool))
    assert result.shape == ((2, 3) if function is masked_whiten else ())
    assert_close(result, torch.zeros_like(result))
    result.sum().backward()
    assert_close(x.grad, torch.zeros(2, 3))


# kills: masked_mean along an axis without clamp(min=1) on the counts
def test_an_empty_row_gives_0_and_no_gradient():
    x, mask = torch.tensor([[1.0, 3.0], [math.nan, math.inf]], requires_grad=True), torch.tensor([[1, 1], [0, 0]])
    mean, total = masked_mean(x, mask, dim=1), masked_sum(x, mask, dim=1)
    assert_close(mean, torch.tensor([2.0, 0.0]))
    assert_close(total, torch.tensor([4.0, 0.0]))
    (mean + total).sum().backward()
    assert_close(x.grad, torch.tensor([[1.5, 1.5], [0.0, 0.0]]))


# kills: masked_mean clamps the count at 2
@pytest.mark.parametrize("x", [3.0, -1000.1, 1e30])
def test_one_kept_element(x):
    x = torch.tensor([9.0, x, -9.0], requires_grad=True)
    mask = torch.tensor([False, True, False])
    assert masked_mean(x, mask).item() == x[1].item()
    assert masked_var(x, mask).item() == 0
    white = masked_whiten(x, mask)
    assert white.tolist() == [0, 0, 0]
    (white.sum() + masked_var(x, mask)).backward()
    assert x.grad.tolist() == [0, 0, 0]


# kills: masked_var does not clean x before its own arithmetic (the mask is left to masked_mean)
@pytest.mark.parametrize("garbage", GARBAGE)
@pytest.mark.parametrize("function", ALL)
def test_padding_reaches_neither_value_nor_gradient(function, garbage):
    _, mask = example()
    weights = torch.tensor([[0.3, -1.0, 2.0], [0.5, 1.0, 1.0]])

    def value_and_gradient(padding):
        x = torch.where(mask, torch.tensor(X), torch.tensor(padding)).requires_grad_()
        result = function(x, mask)
        (result * weights if result.dim() else result).sum().backward()
        return result.detach(), x.grad

    result, gradient = value_and_gradient(garbage)
    clean_result, clean_gradient = value_and_gradient(0.0)
    assert torch.equal(result, clean_result)
    assert torch.equal(gradient, clean_gradient)
    assert gradient[~mask].eq(0).all()
    assert result.isfinite().all()


# kills: masked_sum multiplies by the mask (NaN * 0 is NaN)
@pytest.mark.parametrize("dim", [0, 1])
@pytest.mark.parametrize("garbage", GARBAGE)
@pytest.mark.parametrize("function", [masked_sum, masked_mean])
def test_padding_reaches_no_axis_reduction(function, garbage, dim):
    x, mask = example()
    dirty = torch.where(mask, x, torch.tensor(garbage))
    assert torch.equal(function(dirty, mask, dim=dim), function(x, mask, dim=dim))


# kills: masked_whiten leaves (0 - mean) / sd in padding
def test_whiten_writes_exactly_0_in_padding():
    x, mask = example()
    assert masked_whiten(x, mask)[1].tolist()[1:] == [0, 0]


# kills: _keep returns the mask without .bool()
@pytest.mark.parametrize("dtype", [torch.int64, torch.float32, torch.uint8])
@pytest.mark.parametrize("function", ALL)
def test_a_mask_of_ones_and_zeros_is_a_mask(function, dtype):
    x, mask = example()
    assert torch.equal(function(x, mask.to(dtype)), function(x, mask))


# kills: masked_sum always computes in float32
@pytest.mark.parametrize("dtype", [torch.int64, torch.float64, torch.bfloat16])
def test_sum_takes_any_real_dtype(dtype):
    x, mask = example(dtype=dtype)
    total = masked_sum(x, mask)
    assert total.dtype == dtype
    assert total.item() == 14


# kills: _keep does not compare shapes (a mask that broadcasts would be taken)
@pytest.mark.parametrize("function", ALL)
@pytest.mark.parametrize(("mask_shape", "named"), [((3,), r"\(3,\)"), ((2, 1), r"\(2, 1\)"), ((3, 2), r"\(3, 2\)")])
def test_shapes_that_differ_are_refused_by_name(function, mask_shape, named):
    with pytest.raises(ValueError, match=rf"\(2, 3\).*{named}"):
        function(torch.zeros(2, 3), torch.ones(mask_shape, dtype=torch.bool))


# kills: masked_var detaches its square
@pytest.mark.parametrize("function", ALL)
def test_gradcheck(function):
    x, mask = ragged(3, rows=3, columns=4)
    assert torch.autograd.gradcheck(lambda x: function(x, mask), (x.requires_grad_(),))


# kills: x is centred once, with the float32 rounding of its mean left in
def test_whitening_equal_numbers_gives_about_0():
    assert masked_whiten(torch.full((3,), 1000.1), torch.ones(3)).abs().max() < 1e-2
