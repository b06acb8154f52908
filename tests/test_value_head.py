"""The value head alone: its size, its arithmetic, its precision."""

import pytest
import torch
from torch.testing import assert_close

from rlhf_kit.value_head import ValueHead

KINDS = ["linear", "mlp"]


def awake_head(kind, hidden_size=6, seed=0):
    """A head whose values are not 0."""
    torch.manual_seed(seed)
    head = ValueHead(hidden_size, kind)
    for parameter in head.parameters():
        torch.nn.init.normal_(parameter)
    return head


@pytest.mark.parametrize("hidden_size", [1, 3, 32])
def test_number_of_parameters(hidden_size):
    # kills: mlp d -> d -> 1, bias=False anywhere, two hidden layers
    d = hidden_size
    counts = {kind: sum(p.numel() for p in ValueHead(d, kind).parameters()) for kind in KINDS}
    assert counts == {"linear": d + 1, "mlp": (d + 1) * 4 * d + 4 * d + 1}


@pytest.mark.parametrize("kind", KINDS)
def test_values_start_at_zero(kind):
    # kills: the zero initialisation of the last weight or bias dropped
    torch.manual_seed(0)
    values = ValueHead(8, kind)(torch.randn(3, 5, 8) * 100)
    assert values.shape == (3, 5)
    assert torch.equal(values, torch.zeros(3, 5))


def test_the_hidden_layer_does_not_start_at_zero():
    # kills: every layer zeroed, after which an mlp could only ever learn its last bias
    torch.manual_seed(0)
    head = ValueHead(8, "mlp")
    head(torch.randn(64, 8)).sum().backward()
    assert head.layers[-1].weight.grad.abs().min() > 0
    assert head.layers[0].weight.abs().min() > 0


@pytest.mark.parametrize("kind", KINDS)
def test_values_by_hand(kind):
    # kills: GELU or no activation for ReLU, an activation on the output, squeeze of another axis
    head = awake_head(kind)
    x = torch.randn(40, 1, 6)
    if kind == "linear":
        expected = x @ head.layers[0].weight[0] + head.layers[0].bias
    else:
        hidden = (x @ head.layers[0].weight.T + head.layers[0].bias).clamp(min=0)
        expected = hidden @ head.layers[2].weight[0] + head.layers[2].bias
    assert expected.min() < 0 < expected.max()
    assert_close(head(x), expected)


@pytest.mark.parametrize("shape", [(6,), (1, 6), (4, 6), (2, 1, 6), (0, 3, 6)])
def test_one_value_for_each_position(shape):
    # kills: squeeze() of every axis
    assert awake_head("mlp")(torch.randn(shape)).shape == shape[:-1]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_states_give_float32_values(kind, dtype):
    # kills: the head computing in the dtype of the hidden states, the cast dropped (an error on such states)
    head = awake_head(kind)
    x = torch.randn(4, 5, 6).to(dtype)
    values = head(x)
    assert values.dtype == torch.float32
    assert torch.equal(values, head(x.float()))


@pytest.mark.parametrize("kind", KINDS)
def test_autocast_does_not_reach_the_head(kind):
    # kills: autocast left on inside the head (bfloat16 values, off by about 1e-2)
    head = awake_head(kind)
    x = torch.randn(4, 5, 6)
    expected = head(x)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        values = head(x)
        assert torch.is_autocast_enabled("cpu")  # and it is on again afterwards
    assert values.dtype == torch.float32
    assert torch.equal(values, expected)


@pytest.mark.parametrize("kind", KINDS)
def test_gradients_reach_the_head_and_the_states(kind):
    # kills: hidden states detached, values computed without gradient
    head = awake_head(kind)
    x = torch.randn(4, 6, dtype=torch.bfloat16, requires_grad=True)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        head(x).sum().backward()
    assert x.grad.dtype == torch.bfloat16
    assert x.grad.abs().sum() > 0
    for parameter in head.parameters():
        assert parameter.grad.dtype == torch.float32
        assert parameter.grad.abs().sum() > 0


def test_another_kind_is_refused():
    # kills: falling back to linear for an unknown kind
    with pytest.raises(ValueError, match="'linear' or 'mlp', got 'MLP'"):
        ValueHead(8, "MLP")


@pytest.mark.parametrize("kind", KINDS)
def test_attributes(kind):
    # kills: kind or hidden_size not kept (saving needs the first)
    head = ValueHead(8, kind)
    assert (head.kind, head.hidden_size) == (kind, 8)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_head_that_was_cast_still_computes_in_float32(kind, dtype):
    # kills: the computation in the head's own dtype: `model.to(torch.bfloat16)` takes the head along
    head = awake_head(kind)
    with torch.no_grad():
        for parameter in head.parameters():
            parameter.copy_(parameter.to(dtype))
    x = torch.randn(4, 6).to(dtype)
    expected = head(x.float())
    values = head.to(dtype)(x)
    assert values.dtype == torch.float32
    assert torch.equal(values, expected)
