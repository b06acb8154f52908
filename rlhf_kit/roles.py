"""Several adapters on one base, each with a role of its own, and switching between them.

    policy      the adapter that is active outside of any `using_adapter`      trained
    reference   a frozen copy of where training started from                   where that was a trained adapter
    critic      an adapter under the value head                                trained, with critic="adapter"
    reward      an adapter under a score head                                  frozen, one per reward adapter

PEFT makes every adapter that it activates trainable, also one that was frozen; here each flag is set back.
"""

import copy
from collections.abc import Iterator
from contextlib import contextmanager

from peft import PeftConfig, PeftModel, get_peft_model_state_dict, set_peft_model_state_dict
from peft.functional import set_adapter
from peft.tuners.tuners_utils import BaseTunerLayer
from torch import Tensor, nn

REFERENCE, CRITIC, REWARD = "reference", "critic", "reward"  # names of adapters


def refuse_role_names(active: str) -> None:
    """Raise `ValueError` if the policy's adapter has the name of another role."""
    if active in (REFERENCE, CRITIC):
        raise ValueError(
            f"the active adapter is called {active!r}, which is the name of another role: load it under another name, "
            "e.g. PeftModel.from_pretrained(..., adapter_name='default')."
        )


def has_adapter(model: nn.Module, name: str) -> bool:
    """Whether the model holds an adapter of that name."""
    return isinstance(model, PeftModel) and name in model.peft_config


def add_frozen_adapter(model: PeftModel, name: str, config: PeftConfig, weights: dict[str, Tensor]) -> None:
    """Put a frozen adapter beside the active one, which stays active and as it was.

    Args:
        model: gets the adapter.
        name: of the adapter.
        config: its settings; left as they are.
        weights: as `get_peft_model_state_dict` gives them.

    Raises:
        ValueError: weights that the adapter has no place for, or places without weights.
    """
    config = copy.deepcopy(config)
    config.inference_mode = True
    if hasattr(config, "init_lora_weights"):
        config.init_lora_weights = True  # other choices change the base, and the weights are overwritten anyway
    active = model.active_adapter
    with flags_kept(model):
        model.add_adapter(name, config)
        expected = set(get_peft_model_state_dict(model, adapter_name=name))
        if expected != set(weights):
            wrong = sorted(expected ^ set(weights))
            model.delete_adapter(name)
            model.set_adapter(active)
            raise ValueError(f"the adapter's weights do not fit the model in {len(wrong)} tensors, e.g. {wrong[0]}.")
        set_peft_model_state_dict(model, weights, adapter_name=name)
        model.set_adapter(active)


def copy_of_active(model: PeftModel, name: str) -> None:
    """Put a frozen copy of the active adapter beside it."""
    active = model.active_adapter
    weights = get_peft_model_state_dict(model, adapter_name=active)
    add_frozen_adapter(model, name, model.peft_config[active], weights)


def add_critic_adapter(model: PeftModel) -> None:
    """Put a fresh, trainable adapter with the settings of the active one beside it, for the critic."""
    config = copy.deepcopy(model.peft_config[model.active_adapter])
    config.inference_mode = False
    if hasattr(config, "init_lora_weights"):
        config.init_lora_weights = True
    config.modules_to_save = None  # the critic reads hidden states only
    active = model.active_adapter
    with flags_kept(model):
        model.add_adapter(CRITIC, config)
        model.set_adapter(active)
    for parameter in adapter_parameters(model, CRITIC):
        parameter.requires_grad_(True)


def adapter_parameters(model: nn.Module, name: str) -> list[nn.Parameter]:
    """The weights of one adapter; none if the model has no such adapter."""
    return [p for key, p in model.named_parameters() if f".{name}." in f"{key}."] if has_adapter(model, name) else []


@contextmanager
def using_adapter(module: nn.Module, name: str) -> Iterator[None]:
    """Inside the `with` block a model, or a single layer of one, computes with that adapter and no other."""
    before = next((list(m.active_adapters) for m in module.modules() if isinstance(m, BaseTunerLayer)), None)
    if before is None:  # a layer without adapters
        yield
        return
    flags = [(parameter, parameter.requires_grad) for parameter in module.parameters()]
    try:
        set_adapter(module, name)
        _set_flags(flags)
        yield
    finally:
        set_adapter(module, before if len(before) > 1 else before[0])
        _set_flags(flags)


@contextmanager
def flags_kept(model: nn.Module) -> Iterator[None]:
    """Whatever happens inside, each parameter is as trainable afterwards as it was before."""
    flags = [(parameter, parameter.requires_grad) for parameter in model.parameters()]
    try:
        yield
    finally:
        _set_flags(flags)


def _set_flags(flags: list[tuple[nn.Parameter, bool]]) -> None:
    for parameter, flag in flags:
        parameter.requires_grad_(flag)
