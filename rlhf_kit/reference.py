"""The reference as a frozen second adapter on the same base, for training that starts from a trained adapter.

Fresh adapters change nothing, so with them the reference is the base with adapters switched off. A trained adapter
(from supervised fine-tuning, say) does change the model, and the reference must be what training starts from: that
adapter, frozen, beside the one that is trained.
"""

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from peft import PeftModel, get_peft_model_state_dict, set_peft_model_state_dict
from torch import nn
from transformers import PreTrainedModel

from rlhf_kit.probes import adapters_change_model

REFERENCE = "reference"  # name of the adapter


def has_reference_adapter(model: nn.Module) -> bool:
    """Whether the model holds an adapter of that name."""
    return isinstance(model, PeftModel) and REFERENCE in model.peft_config


def make_reference(model: Any, ref_model: PreTrainedModel | None) -> PreTrainedModel | None:
    """What an `AutoModelForCausalLMWithValueHead` takes for its reference; see its `create_reference`.

    Returns:
        A frozen model of its own, or None where the reference lives on the policy's base.
    """
    own = {id(p) for p in model.pretrained_model.parameters()}
    if ref_model is not None and any(id(p) in own for p in ref_model.parameters()):
        raise ValueError(
            "ref_model shares weights with the policy, so it would change along with it: pass None (with adapters "
            "the reference is the same base with adapters off, else a frozen copy is made), or a model of its own."
        )
    if ref_model is None and model.is_peft_model:
        if not has_reference_adapter(model.pretrained_model) and adapters_change_model(model):
            add_reference_adapter(model.pretrained_model)
        return None
    reference = copy.deepcopy(model.pretrained_model) if ref_model is None else ref_model
    reference.requires_grad_(False).eval()
    if not getattr(reference, "is_quantized", False):
        reference.to(model.device)
    return reference


def add_reference_adapter(model: PeftModel) -> None:
    """Copy the active adapter into a frozen one named "reference"; the active one stays active and as it was."""
    active = model.active_adapter
    config = copy.deepcopy(model.peft_config[active])
    if hasattr(config, "init_lora_weights"):
        config.init_lora_weights = True  # other choices change the base, and these weights are overwritten anyway
    with _flags_kept(model):
        model.add_adapter(REFERENCE, config)
        weights = get_peft_model_state_dict(model, adapter_name=active)
        set_peft_model_state_dict(model, weights, adapter_name=REFERENCE)
        model.set_adapter(active)


@contextmanager
def reference_adapter(model: PeftModel) -> Iterator[None]:
    """Inside the `with` block the reference speaks: its own adapter, or the base with all adapters switched off."""
    active = model.active_adapter
    with _flags_kept(model):
        if not has_reference_adapter(model):
            with model.disable_adapter():
                yield
            return
        try:
            model.set_adapter(REFERENCE, inference_mode=True)
            yield
        finally:
            model.set_adapter(active)


@contextmanager
def _flags_kept(model: PeftModel) -> Iterator[None]:
    """PEFT makes every adapter that it activates trainable, also one that was frozen: each flag is set back."""
    flags = [(parameter, parameter.requires_grad) for parameter in model.parameters()]
    try:
        yield
    finally:
        for parameter, flag in flags:
            parameter.requires_grad_(flag)
