"""Forward passes over finished sequences: exact positions, no dropout, LM head on completion tokens only.

Everything about architecture is left to transformers: hidden states are what the LM head is fed and logits what the
model returns, so logit scaling, soft-capping and the like need no code here.
"""

import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from transformers import GenerationConfig, PreTrainedModel
from transformers.modeling_layers import GradientCheckpointingLayer

from rlhf_kit.roles import using_adapter


def completion_outputs(
    model: nn.Module, causal_lm: PreTrainedModel, input_ids: Tensor, attention_mask: Tensor, completion_length: int
) -> tuple[Tensor, Tensor]:
    """Logits (B, T, V) and LM-head inputs (B, T, d) at the positions that choose completion tokens."""
    last = input_ids.shape[1] - 1
    positions = torch.arange(last - completion_length, last, device=input_ids.device)  # (T,) = P - 1 ... P + T - 2
    kwargs = position_ids(causal_lm, attention_mask)
    keeps = "logits_to_keep" in inspect.signature(causal_lm.forward).parameters
    if keeps:
        kwargs["logits_to_keep"] = positions
    with lm_head_input(causal_lm) as captured:
        logits = model(input_ids=input_ids, attention_mask=attention_mask, use_cache=False, **kwargs).logits
    hidden = captured[0]
    return (logits, hidden) if keeps else (logits[:, positions], hidden[:, positions])


def hidden_states(model: nn.Module, causal_lm: PreTrainedModel, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
    """LM-head inputs (B, S, d) at every position; the LM head itself is left out."""
    kwargs = position_ids(causal_lm, attention_mask)
    head = causal_lm.get_output_embeddings()
    causal_lm.set_output_embeddings(nn.Identity())
    try:
        with lm_head_input(causal_lm) as captured:
            model(input_ids=input_ids, attention_mask=attention_mask, use_cache=False, **kwargs)
    finally:
        causal_lm.set_output_embeddings(head)
    return captured[0]


def position_ids(causal_lm: PreTrainedModel, attention_mask: Tensor) -> dict[str, Tensor]:
    """Positions that count real tokens only, for models that take them: left padding then changes nothing."""
    if "position_ids" not in inspect.signature(causal_lm.forward).parameters:
        return {}
    return {"position_ids": (attention_mask.long().cumsum(-1) - 1).clamp(min=0)}


@contextmanager
def lm_head_input(causal_lm: PreTrainedModel) -> Iterator[list[Tensor]]:
    """Collects what the LM head is fed: the final normalised hidden state, at the positions it is applied to."""
    captured: list[Tensor] = []
    hook = causal_lm.get_output_embeddings().register_forward_pre_hook(lambda _, args: captured.append(args[0]))
    try:
        yield captured
    finally:
        hook.remove()


@contextmanager
def without_dropout(model: nn.Module) -> Iterator[None]:
    """Eval mode inside; each module's own mode again outside."""
    training = [module for module in model.modules() if module.training]
    model.eval()
    try:
        yield
    finally:
        for module in training:
            module.training = True


@contextmanager
def generation_config(causal_lm: PreTrainedModel, config: GenerationConfig) -> Iterator[None]:
    """Swap the model's generation config: `generate` fills every field we leave None from it."""
    own = causal_lm.generation_config
    causal_lm.generation_config = config
    try:
        yield
    finally:
        causal_lm.generation_config = own


def checkpointable_layers(causal_lm: PreTrainedModel) -> list[nn.Module]:
    """The layers that support gradient checkpointing; `ValueError` if there are none."""
    layers = [m for m in causal_lm.modules() if isinstance(m, GradientCheckpointingLayer)]
    if not layers:
        raise ValueError(f"{type(causal_lm).__name__} has no layers that support gradient checkpointing: turn it off.")
    return layers


@contextmanager
def checkpointed_layers(causal_lm: PreTrainedModel, enabled: bool, adapter: str | None = None) -> Iterator[None]:
    """Checkpoint every decoder layer. transformers' own switch works in train mode only, which would add dropout.

    Args:
        causal_lm: its layers are checkpointed in passes inside the `with` block.
        enabled: False = nothing is done.
        adapter: what is active inside the block, if that is not what will be active in the backward pass.
    """
    layers = checkpointable_layers(causal_lm) if enabled else []
    replaced = [layer.__dict__.get("forward") for layer in layers]  # hooks of accelerate live there
    for layer in layers:
        layer.forward = partial(_checkpointed_forward, layer, layer.forward, adapter)
    try:
        yield
    finally:
        for layer, forward in zip(layers, replaced, strict=True):
            if forward is None:
                del layer.forward
            else:
                layer.forward = forward


def _checkpointed_forward(
    layer: nn.Module, forward: Callable[..., Any], adapter: str | None, *args: Any, **kwargs: Any
) -> Any:
    def run(*args: Any, **kwargs: Any) -> Any:
        # The backward pass runs this again, when the model may be in train mode and use another adapter.
        with without_dropout(layer), using_adapter(layer, adapter) if adapter else nullcontext():
            return forward(*args, **kwargs)

    return checkpoint(run, *args, use_reentrant=False, **kwargs)
