"""What policy and critic are compared to: the base with adapters off, a frozen adapter, or a frozen model.

Fresh adapters change nothing, so with them the reference is the base with adapters switched off. A trained adapter
(from supervised fine-tuning, say) does change the model, and the reference must be what training starts from: that
adapter, frozen, beside the one that is trained.
"""

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from peft import PeftModel
from transformers import PreTrainedModel

from rlhf_kit.probes import adapters_change_model
from rlhf_kit.roles import REFERENCE, copy_of_active, flags_kept, has_adapter, using_adapter


def make_reference(model: Any, ref_model: PreTrainedModel | None) -> PreTrainedModel | None:
    """What an `AutoModelForCausalLMWithValueHead` takes for its reference; see its `create_reference`.

    Returns:
        A frozen model of its own, or None where the reference lives on the policy's base.
    """
    if ref_model is not None:
        _check_reference_model(model, ref_model)
    own = {id(p) for p in model.pretrained_model.parameters()}
    if ref_model is not None and any(id(p) in own for p in ref_model.parameters()):
        raise ValueError(
            "ref_model shares weights with the policy, so it would change along with it: pass None (with adapters "
            "the reference is the same base with adapters off, else a frozen copy is made), or a model of its own."
        )
    if ref_model is None and model.is_peft_model:
        if not has_adapter(model.pretrained_model, REFERENCE) and adapters_change_model(model):
            copy_of_active(model.pretrained_model, REFERENCE)
        return None
    reference = copy.deepcopy(model.pretrained_model) if ref_model is None else ref_model
    reference.requires_grad_(False).eval()
    if not getattr(reference, "is_quantized", False):
        reference.to(model.device)
    return reference


def _check_reference_model(model: Any, ref_model: Any) -> None:
    if not isinstance(ref_model, PreTrainedModel | PeftModel):
        raise TypeError(
            f"ref_model must be a loaded causal LM, got {type(ref_model).__name__}: pass "
            "AutoModelForCausalLM.from_pretrained(name), or the pretrained_model of a model with value head."
        )
    known = int(ref_model.config.get_text_config().vocab_size)
    if known != model.vocab_size:
        raise ValueError(f"ref_model knows {known} tokens and the policy {model.vocab_size}: they need the same.")


@contextmanager
def reference_adapter(model: PeftModel) -> Iterator[None]:
    """Inside the `with` block the reference speaks: its own adapter, or the base with all adapters switched off."""
    if has_adapter(model, REFERENCE):
        with using_adapter(model, REFERENCE):
            yield
    else:
        with flags_kept(model), model.disable_adapter():
            yield
