"""token_logprobs and entropy_from_logits against softmax written out in plain Python."""

import math

import pytest
import torch
from torch.testing import assert_close

from rlhf_kit.functional import entropy_from_logits, token_logprobs

LOG3 = math.log(3.0)


def softmax(logits):
    """Probabilities by their definition, from Python floats; -inf has probability 0."""
    top = max(logits)
    weights = [math.exp(z - top) for z in logits]
    return [w / math.fsum(weights) for w in weights]


def slow_entropy(p):
    return -math.fsum(a * math.log(a) for a in p if a > 0)


def random_logits(seed, *shape):
    generator = torch.Generator().manual_seed(seed)
    return 4 * torch.randn(*shape, generator=generator, dtype=torch.float64)


# kills: logits are multiplied by the temperature
@pytest.mark.parametrize(
    ("temperature", "probabilities"),
    [(1.0, [0.25, 0.75]), (0.5, [0.1, 0.9]), (1e6, [0.5, 0.5]), (1e-3, [None, 1.0])],
)
def test_token_logprobs_by_hand(temperature, probabilities):
    logits = torch.tensor([0.0, LOG3], dtype=torch.float64)  # odds 1 : 3, and 1 : 9 at temperature 1/2
    for token, probability in enumerate(probabilities):
        if probability is not None:
            logprob = token_logprobs(logits, torch.tensor(token), temperature=temperature)
            assert_close(logprob.item(), math.log(probability), atol=1e-5, rtol=0)


# kills: the normaliser is detached
@pytest.mark.parametrize("temperature", [1.0, 0.5])
def test_token_logprobs_gradient_by_hand(temperature):
    logits = torch.tensor([[0.0, LOG3], [0.0, LOG3]], dtype=torch.float64, requires_grad=True)
    token_logprobs(logits, torch.tensor([0, 1]), temperature=temperature).sum().backward()
    p = {1.0: 0.75, 0.5: 0.9}[temperature]
    # ([x is the token] - p(x)) / temperature
    expected = [[p / temperature, -p / temperature], [-(1 - p) / temperature, (1 - p) / temperature]]
    assert_close(logits.grad.tolist(), expected)


# kills: the temperature divides the log-probabilities, not the logits
@pytest.mark.parametrize("temperature", [0.3, 1.0, 1.7])
def test_token_logprobs_match_plain_python(temperature):
    logits = random_logits(0, 3, 4, 6).requires_grad_()
    tokens = torch.randint(6, (3, 4), generator=torch.Generator().manual_seed(1))
    logprobs = token_logprobs(logits, tokens, temperature=temperature)
    logprobs.sum().backward()
    assert logprobs.shape == (3, 4)
    rows = logits.detach().reshape(-1, 6).tolist()
    for row, token, logprob, gradient in zip(
        rows, tokens.flatten().tolist(), logprobs.flatten().tolist(), logits.grad.reshape(-1, 6).tolist(), strict=True
    ):
        p = softmax([z / temperature for z in row])
        assert_close(logprob, math.log(p[token]))
        assert_close(gradient, [(float(x == token) - p[x]) / temperature for x in range(6)])


# kills: the default temperature is not 1
def test_the_probabilities_of_all_tokens_add_up_to_1():
    logits = random_logits(2, 5)
    logprobs = token_logprobs(logits.expand(5, 5), torch.arange(5))
    assert_close(logprobs.exp().sum().item(), 1.0)
    assert_close(logprobs, logits.log_softmax(-1))


# kills: token ids are shifted by one
def test_token_logprobs_name_their_own_token():
    logits = torch.tensor([[5.0, 0.0, 0.0], [0.0, 5.0, 0.0], [0.0, 0.0, 5.0]])
    assert (token_logprobs(logits, torch.tensor([0, 1, 2])) > -0.02).all()
    assert (token_logprobs(logits, torch.tensor([1, 2, 0])) < -4.9).all()


# kills: logsumexp is written as exp().sum().log()
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_token_logprobs_of_extreme_logits_stay_finite(dtype):
    logits = torch.tensor([[1000.0, 0.0], [-1000.0, -1000.0], [1000.0, -1000.0]], dtype=dtype, requires_grad=True)
    logprobs = token_logprobs(logits, torch.tensor([1, 0, 1]))
    logprobs.sum().backward()
    # 1e-4: at an offset of 1000 neighbouring float32 numbers are 6e-5 apart.
    assert_close(logprobs, torch.tensor([-1000.0, -math.log(2), -2000.0], dtype=dtype), atol=1e-4, rtol=0)
    expected = torch.tensor([[-1.0, 1.0], [0.5, -0.5], [-1.0, 1.0]], dtype=dtype)
    assert_close(logits.grad, expected, atol=1e-4, rtol=0)


# kills: -inf logits are replaced by 0 before the normaliser
def test_impossible_tokens_take_no_probability():
    logits = torch.tensor([0.0, LOG3, -math.inf], dtype=torch.float64, requires_grad=True)
    logprob = token_logprobs(logits, torch.tensor(0))
    logprob.backward()
    assert_close(logprob.item(), math.log(0.25))
    assert_close(logits.grad.tolist(), [0.75, -0.75, 0.0])
    assert token_logprobs(logits, torch.tensor(2)).item() == -math.inf


# kills: token_logprobs computes in the dtype of the logits
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_logits_are_computed_in_float32(dtype):
    logits = random_logits(3, 4, 100).to(dtype)
    tokens = torch.arange(4)
    logprobs = token_logprobs(logits, tokens, temperature=0.7)
    assert logprobs.dtype == torch.float32
    assert_close(logprobs, token_logprobs(logits.double(), tokens, temperature=0.7).float())
    entropy = entropy_from_logits(logits)
    assert entropy.dtype == torch.float32
    assert_close(entropy, entropy_from_logits(logits.double()).float())


# kills: the cast to float32 happens after the division by the temperature
def test_the_temperature_divides_float32_numbers():
    logits = torch.tensor([[3.0, 1.0]], dtype=torch.bfloat16)
    logprob = token_logprobs(logits, torch.tensor([1]), temperature=0.7)
    assert_close(logprob.item(), -2 / 0.7 - math.log1p(math.exp(-2 / 0.7)), atol=1e-6, rtol=0)


# kills: float64 logits are cast down to float32
def test_float64_stays_float64():
    logits = random_logits(4, 2, 4).requires_grad_()
    tokens = torch.tensor([1, 3])
    assert token_logprobs(logits, tokens).dtype == torch.float64
    assert entropy_from_logits(logits).dtype == torch.float64
    assert torch.autograd.gradcheck(lambda z: token_logprobs(z, tokens, temperature=0.7), (logits,))
    assert torch.autograd.gradcheck(entropy_from_logits, (logits,))


# kills: the cast to float32 detaches
def test_bfloat16_logits_receive_their_gradient():
    logits = torch.tensor([0.0, 1.0, -1.0], dtype=torch.bfloat16, requires_grad=True)
    token_logprobs(logits, torch.tensor(1)).backward()
    p = softmax([0.0, 1.0, -1.0])
    assert logits.grad.dtype == torch.bfloat16
    assert_close(logits.grad.float(), torch.tensor([-p[0], 1 - p[1], -p[2]]), atol=4e-3, rtol=0)


# kills: a temperature of 0 passes (< 0 in place of <= 0)
@pytest.mark.parametrize("temperature", [0, 0.0, -1.0])
def test_temperatures_that_are_not_positive_are_refused(temperature):
    with pytest.raises(ValueError, match=rf"temperature must be above 0, got {temperature}\."):
        token_logprobs(torch.zeros(2, 3), torch.tensor([0, 1]), temperature=temperature)


# kills: the shape of token_ids is not checked (gather would read a part of the logits)
@pytest.mark.parametrize("shape", [(), (1,), (2,), (2, 1), (2, 3, 1)])
def test_token_ids_of_another_shape_are_refused(shape):
    with pytest.raises(ValueError, match=r"token_ids must have shape \(2, 3\).*\(2, 3, 5\)") as error:
        token_logprobs(torch.zeros(2, 3, 5), torch.zeros(shape, dtype=torch.int64))
    assert f"got {shape}" in str(error.value)


# kills: the entropy is negative (sign)
@pytest.mark.parametrize(
    ("logits", "expected"),
    [
        ([0.0, 0.0, 0.0, 0.0], math.log(4)),
        ([7.0, 7.0], math.log(2)),
        ([0.0, LOG3], math.log(4) - 0.75 * LOG3),
        ([0.0], 0.0),
        ([0.0, 1000.0], 0.0),
        ([0.0, 0.0, -math.inf], math.log(2)),
    ],
)
def test_entropy_by_hand(logits, expected):
    assert_close(entropy_from_logits(torch.tensor(logits, dtype=torch.float64)).item(), expected)


# kills: the entropy is a mean over the vocabulary
@pytest.mark.parametrize("seed", range(3))
def test_entropy_and_gradient_match_plain_python(seed):
    logits = random_logits(seed, 2, 3, 6).requires_grad_()
    entropy = entropy_from_logits(logits)
    entropy.sum().backward()
    assert entropy.shape == (2, 3)
    for row, value, gradient in zip(
        logits.reshape(-1, 6).tolist(), entropy.flatten().tolist(), logits.grad.reshape(-1, 6).tolist(), strict=True
    ):
        p = softmax(row)
        assert_close(value, slow_entropy(p))
        assert_close(gradient, [-a * (math.log(a) + slow_entropy(p)) for a in p])


# kills: the entropy detaches the probabilities
def test_entropy_gradient_by_hand():
    logits = torch.tensor([0.0, LOG3], dtype=torch.float64, requires_grad=True)
    entropy_from_logits(logits).backward()
    # d H / d z_2 = -p1 p2 log(p2 / p1)
    assert_close(logits.grad.tolist(), [3 / 16 * LOG3, -3 / 16 * LOG3])


# kills: a token of probability 0 contributes 0 * -inf
def test_entropy_of_impossible_tokens_is_finite():
    logits = torch.tensor([[0.0, LOG3, -math.inf], [-math.inf, 2.0, -math.inf]], dtype=torch.float64)
    logits.requires_grad_()
    entropy = entropy_from_logits(logits)
    entropy.sum().backward()
    assert_close(entropy.tolist(), [math.log(4) - 0.75 * LOG3, 0.0])
    assert_close(logits.grad.tolist(), [[3 / 16 * LOG3, -3 / 16 * LOG3, 0.0], [0.0, 0.0, 0.0]])


# kills: the entropy takes the logarithm of a softmax (log 0 for far tails)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_entropy_of_extreme_logits_stays_finite(dtype):
    logits = torch.tensor([[1000.0, 0.0, -1000.0], [-1000.0, -1000.0, -1000.0]], dtype=dtype, requires_grad=True)
    entropy = entropy_from_logits(logits)
    entropy.sum().backward()
    assert_close(entropy, torch.tensor([0.0, math.log(3)], dtype=dtype))
    assert_close(logits.grad, torch.zeros(2, 3, dtype=dtype))


# kills: the entropy of unnormalised logits (no log_softmax)
def test_entropy_lies_between_0_and_log_v_and_ignores_a_shift():
    logits = random_logits(5, 50, 8)
    entropy = entropy_from_logits(logits)
    assert (entropy >= 0).all()
    assert (entropy <= math.log(8)).all()
    assert_close(entropy_from_logits(logits + 9), entropy)
