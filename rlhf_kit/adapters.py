"""LoRA adapters: which layers they go on, what cannot be switched off, and what is trained in the end."""

import copy
import warnings
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

from peft import PeftConfig, PeftModel, PeftType, TaskType, get_peft_model
from peft.tuners.lora.layer import ParamWrapper
from peft.tuners.tuners_utils import BaseTunerLayer
from peft.utils import TRANSFORMERS_MODELS_TO_LORA_TARGET_MODULES_MAPPING as PEFT_TARGETS
from peft.utils.other import AuxiliaryTrainingWrapper
from torch import nn
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

# Query and value projections under the names they have, for architectures that PEFT's table does not know.
ATTENTION_NAMES = (["q_proj", "v_proj"], ["query_key_value"], ["qkv_proj"], ["c_attn"], ["Wqkv"], ["query", "value"],
                   ["in_proj"])  # fmt: skip


def add_adapters(model: PreTrainedModel, config: PeftConfig) -> PeftModel:
    """Fresh adapters around a model.

    Args:
        model: gets the adapters in place.
        config: left as it is. Where it names no target_modules, the query and value projections are chosen, in the
            words of the architecture; where it has none, all linear layers but the LM head.

    Raises:
        ValueError: adapters that cannot be switched off exactly, or a name that no layer has.
    """
    if not isinstance(config, PeftConfig):
        raise TypeError(f"peft_config must be a PeftConfig such as LoraConfig(r=16), got {type(config).__name__}.")
    check_peft_config(config, "peft_config")
    config = copy.deepcopy(config)
    config.task_type = TaskType.CAUSAL_LM
    if getattr(config, "lora_dropout", 0):
        warnings.warn(
            f"lora_dropout={config.lora_dropout} has no effect: PPO compares the probabilities of a token before and "
            "after an update, and dropout would change them without one. It is off in every pass.",
            stacklevel=2,
        )
    layers = {name.rsplit(".", 1)[-1]: layer for name, layer in model.named_modules() if _is_linear(layer)}
    if (
        hasattr(config, "target_modules")
        and not hasattr(config, "feedforward_modules")  # IA3: PEFT's own choice belongs together
        and config.target_modules is None
        and not getattr(config, "target_parameters", None)
    ):
        config.target_modules = _default_targets(model, layers)
    if hasattr(config, "fan_in_fan_out"):  # PEFT would set it too, with a warning
        targets = config.target_modules
        named = layers if isinstance(targets, str) else {name.rsplit(".", 1)[-1] for name in targets or ()}
        config.fan_in_fan_out = any(isinstance(layers.get(name), Conv1D) for name in named)
    try:
        adapted = get_peft_model(model, config)
    except ValueError as error:
        if "not found in the base model" not in str(error):
            raise
        raise ValueError(_no_such_layers(config.target_modules, layers)) from error
    refuse_unmatched_targets(adapted)
    return adapted


def _no_such_layers(names: str | Iterable[str], found: Iterable[str]) -> str:
    wrong = names if isinstance(names, str) else sorted(names)
    return (
        f"target_modules names {wrong}, but the model has no such layers; those found are {sorted(found)}. Correct "
        "the names, or use target_modules='all-linear'."
    )


def _default_targets(model: PreTrainedModel, layers: dict[str, nn.Module]) -> list[str] | str:
    known = PEFT_TARGETS.get(model.config.model_type)
    for names in ([known] if known else []) + list(ATTENTION_NAMES):
        if not isinstance(names, str) and all(name in layers for name in names):
            return list(names)
    return "all-linear"


def _is_linear(layer: nn.Module) -> bool:
    return isinstance(layer, nn.Linear | Conv1D)  # bitsandbytes' layers are nn.Linear too


def describe_training(model: Any) -> str:
    """One line on what of an `AutoModelForCausalLMWithValueHead` is trained."""
    total = sum(_numel(p) for p in model.pretrained_model.parameters())
    trained = sum(p.numel() for p in model.pretrained_model.parameters() if p.requires_grad)
    amount = f"{trained:,} of {total:,} parameters ({trained / total:.2%}) and the {model.v_head.kind} value head"
    if not model.is_peft_model:
        return f"Training {amount}."
    if model.critic == "adapter":
        amount += " on an adapter of its own"
    config = model.pretrained_model.active_peft_config
    names = _adapted_layers(model.pretrained_model)
    kinds = ", ".join(sorted({name.rsplit(".", 1)[-1] for name in names}))
    rank = f" r={config.r}" if hasattr(config, "r") else ""
    return f"Training {amount}: {config.peft_type.value}{rank} on {kinds} ({len(names)} layers)."


def _adapted_layers(model: PeftModel) -> list[str]:
    """Names of the layers that the active adapter is on, or of the parameters where it is on single ones."""
    active = model.active_adapter
    names = [
        name
        for name, layer in model.named_modules()
        if isinstance(layer, BaseTunerLayer)
        and not isinstance(layer, ParamWrapper)
        and any(active in getattr(layer, kind) for kind in layer.adapter_layer_names)
    ]
    return sorted(names or getattr(model.base_model, "targeted_parameter_names", []))


def _numel(parameter: nn.Parameter) -> int:
    """Number of weights; bitsandbytes packs two 4-bit weights into a byte."""
    packed = getattr(parameter, "quant_state", None) is not None
    return parameter.numel() * 2 if packed else parameter.numel()


def refuse_unmatched_targets(model: PeftModel) -> None:
    """Raise `ValueError` for a name in `target_modules` that no layer has: PEFT complains only if all are wrong."""
    adapted = model.base_model.targeted_module_names
    for config in model.peft_config.values():
        targets = getattr(config, "target_modules", None)
        if targets is None or isinstance(targets, str):
            continue
        unmatched = sorted(t for t in targets if not any(name == t or name.endswith(f".{t}") for name in adapted))
        if unmatched:
            linear = {n.rsplit(".", 1)[-1] for n, m in model.named_modules() if hasattr(m, "base_layer")}
            raise ValueError(_no_such_layers(unmatched, linear))


def refuse_leftover_adapters(model: nn.Module) -> None:
    """Raise `ValueError` if a bare model still holds the adapter layers of an earlier `PeftModel` around it."""
    layer = next((name for name, module in model.named_modules() if isinstance(module, BaseTunerLayer)), None)
    if layer is not None:
        raise ValueError(
            f"this {type(model).__name__} already holds adapter layers, e.g. {layer}: PEFT puts them into the model "
            "that it is given. Load the model afresh for each run, call unload() on the earlier PeftModel, or pass "
            "that PeftModel without peft_config to go on training it."
        )


@contextmanager
def bare_again_on_error(model: Any) -> Iterator[None]:
    """If the block raises, adapters that it put into a loaded model without any are taken out again.

    Args:
        model: anything; only a bare `PreTrainedModel` is looked after.
    """
    bare = isinstance(model, PreTrainedModel) and not any(isinstance(m, BaseTunerLayer) for m in model.modules())
    flags = [(p, p.requires_grad) for p in model.parameters()] if bare else []
    try:
        yield
    except Exception:
        if bare:
            _take_out_adapters(model)
            for parameter, flag in flags:
                parameter.requires_grad_(flag)
        raise


def _take_out_adapters(model: PreTrainedModel) -> None:
    taken: list[str] = []
    for name, module in list(model.named_modules()):
        if any(name.startswith(f"{outer}.") for outer in taken):
            continue
        if isinstance(module, BaseTunerLayer):
            model.set_submodule(name, module.get_base_layer())
            taken.append(name)
        elif isinstance(module, AuxiliaryTrainingWrapper):
            model.set_submodule(name, module.original_module)
            taken.append(name)
    model.__dict__.pop("peft_config", None)


def check_peft_config(config: PeftConfig, name: str) -> None:
    """Raise `ValueError` for adapters that cannot be switched off or saved exactly; `name` is for the message."""
    if config.is_prompt_learning:
        raise ValueError(
            f"{name} is {config.peft_type}: prompt learning shifts positions and is not supported. Use LoRA."
        )
    if getattr(config, "bias", "none") != "none":
        raise ValueError(
            f"{name} trains biases of the base (bias={config.bias!r}), so switching the adapters off would no longer "
            "give the reference: use bias='none'."
        )
    if config.peft_type == PeftType.ADALORA:
        raise ValueError(
            f"{name} is ADALORA, whose ranks change while it is trained, by a schedule that PPO's loop does not "
            "follow. Use LoRA."
        )
    start = getattr(config, "init_lora_weights", None)
    if isinstance(start, str) and start.startswith(("pissa_niter", "corda", "lora_ga", "loftq")):
        raise ValueError(
            f"{name} has init_lora_weights={start!r}, which changes the base in a way that an adapter folder does "
            "not hold, so the saved adapter would be loaded onto another base: use 'pissa', 'olora' or True."
        )
    if config.task_type not in (None, TaskType.CAUSAL_LM):
        raise ValueError(
            f"{name} has task_type={config.task_type!r}, but the policy is a causal LM, and could not be loaded as "
            "one again: use task_type='CAUSAL_LM'. A reward model belongs in reward_funcs."
        )
