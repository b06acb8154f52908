"""bitsandbytes layers, made fit for probability ratios: int8 and 4-bit weights, exact products, trainable adapters.

LLM.int8() rounds the activations to int8 too, and picks outlier columns over the whole batch. Its log-probs then
depend on padding, neighbours and later tokens, and the smallest change of a weight moves them by tenths of a nat: the
ratio is not 1 before anything has moved, and a third of all tokens is clipped. Here the weights alone are int8.
"""

from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn


def adjust_quantized_layers(model: nn.Module) -> None:
    """Change how the bitsandbytes layers of a model multiply, however it was loaded; their weights stay as they are.

    8 bits: weights are scaled back to the precision of the input, layer by layer. 4 bits: no repacking for fast
    inference on CPUs with AVX512-BF16, which happens in the first pass without gradient and stops gradients from then
    on.

    Raises:
        ValueError: 4-bit layers that were repacked already.
    """
    for module in model.modules():
        if hasattr(getattr(module, "state", None), "threshold"):
            # Where accelerate has hooked the layer, its own forward is this one.
            setattr(module, "_old_forward" if hasattr(module, "_old_forward") else "forward",
                    MethodType(_int8_forward, module))  # fmt: skip
        if hasattr(module, "support_avx512bf16_for_cpu"):
            module.support_avx512bf16_for_cpu = False
            if getattr(module.weight.quant_state, "packing_format_for_cpu", False):
                raise ValueError(
                    "the 4-bit layers of this model were repacked for inference when it ran without gradients on this "
                    "CPU, and can no longer be trained through: load it again and wrap it before its first use."
                )


def _int8_forward(layer: Any, x: Tensor) -> Tensor:
    """Forward of `bitsandbytes.nn.Linear8bitLt`: (..., in) -> (..., out) in the precision of x."""
    if layer.weight.CB is not None:
        layer.init_8bit_state()
    output = _Int8Product.apply(x, layer.weight.data, layer.state.SCB)
    return output if layer.bias is None else output + layer.bias.to(x.dtype)


class _Int8Product(torch.autograd.Function):
    """x W^T with W = diag(scales / 127) weights, scaled back anew in the backward pass rather than kept."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weights: Tensor, scales: Tensor) -> Tensor:
        """x (..., in), weights (out, in) int8, scales (out,) float32 -> (..., out)."""
        ctx.save_for_backward(weights, scales)
        return nn.functional.linear(x, _scaled_back(weights, scales, x.dtype))

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        """Gradient of x; the weights are frozen."""
        weights, scales = ctx.saved_tensors
        return gradients[0] @ _scaled_back(weights, scales, gradients[0].dtype), None, None


def _scaled_back(weights: Tensor, scales: Tensor, dtype: torch.dtype) -> Tensor:
    return weights.to(dtype) * (scales / 127).to(dtype)[:, None]
