"""The critic's last layer: one number per position from the final normalised hidden state."""

from typing import Literal

import torch
from safetensors.torch import load_file
from torch import Tensor, nn


class ValueHead(nn.Module):
    """Maps hidden states to values, in float32 whatever the model computes in and whatever dtype it was cast to.

        linear: d -> 1                    d + 1 parameters
        mlp:    d -> 4d -> ReLU -> 1      (d + 1) 4d + 4d + 1 parameters

    The output layer starts at zero, so every value is 0 until the first optimizer step.

    Args:
        hidden_size: d, the width of the hidden state that the LM head reads.
        kind: "linear" or "mlp".

    Raises:
        ValueError: another kind.
    """

    def __init__(self, hidden_size: int, kind: Literal["linear", "mlp"] = "linear"):
        super().__init__()
        self.hidden_size = hidden_size
        self.kind = kind
        if kind == "linear":
            self.layers = nn.Sequential(nn.Linear(hidden_size, 1))
        elif kind == "mlp":
            self.layers = nn.Sequential(
                nn.Linear(hidden_size, 4 * hidden_size), nn.ReLU(), nn.Linear(4 * hidden_size, 1)
            )
        else:
            raise ValueError(f"value_head must be 'linear' or 'mlp', got {kind!r}.")
        nn.init.zeros_(self.layers[-1].weight)
        nn.init.zeros_(self.layers[-1].bias)

    def forward(self, hidden_states: Tensor) -> Tensor:
        """(..., d) hidden states of any float dtype -> (...) float32 values, in score units."""
        with torch.autocast(hidden_states.device.type, enabled=False):
            x = hidden_states.float()
            for layer in self.layers:
                linear = isinstance(layer, nn.Linear)
                x = nn.functional.linear(x, layer.weight.float(), layer.bias.float()) if linear else layer(x)
            return x.squeeze(-1)


def load_value_head(path: str, kind: str | None) -> ValueHead:
    """A value head as `save_pretrained` wrote it.

    Raises:
        ValueError: it is of another kind than asked for; None takes either.
    """
    weights = load_file(path)
    found: Literal["linear", "mlp"] = "mlp" if len(weights) > 2 else "linear"
    if kind not in (None, found):
        raise ValueError(f"{path} holds a {found!r} value head, but value_head={kind!r} was asked for.")
    head = ValueHead(weights["layers.0.weight"].shape[1], found)
    head.load_state_dict(weights)
    return head
