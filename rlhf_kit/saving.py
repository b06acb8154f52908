"""Model folders: the adapter with its value head as PEFT writes it, or one plain model with the adapter merged in.

`model` is an `AutoModelForCausalLMWithValueHead` everywhere.
"""

import copy
import tempfile
from pathlib import Path
from typing import Any

from huggingface_hub import HfApi
from peft import PeftModel
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM, PreTrainedModel

from rlhf_kit.loading import ADAPTER_FILE, fit_embeddings
from rlhf_kit.probes import logprob_difference
from rlhf_kit.roles import CRITIC

VALUE_HEAD_FILE = "value_head.safetensors"


def save_folder(model: Any, folder: Path, **kwargs: Any) -> None:
    """Write the trained adapter (or the whole model) with the value head, and the critic's adapter, beside it."""
    if model.is_peft_model:
        active = model.pretrained_model.active_adapter
        own = [CRITIC] if model.critic == "adapter" else []  # in a folder of its name
        model.pretrained_model.save_pretrained(folder, selected_adapters=[active, *own], **kwargs)
        if active != "default":
            for file in (folder / active).iterdir():  # PEFT's folder for other names
                file.replace(folder / file.name)
            (folder / active).rmdir()
    else:
        model.pretrained_model.save_pretrained(folder, **kwargs)
    weights = {name: tensor.detach().cpu().contiguous() for name, tensor in model.v_head.state_dict().items()}
    save_file(weights, folder / VALUE_HEAD_FILE, metadata={"kind": model.v_head.kind})


def refuse_model_folder(folder: Path) -> None:
    """Raise `ValueError` for a folder that holds a model or an adapter already.

    A model would be overwritten, and an adapter be applied by transformers to the merged model once more.
    """
    found = [name for name in ("adapter_config.json", "config.json") if (folder / name).exists()]
    if found:
        kind = "an adapter" if found[0] == "adapter_config.json" else "a model"
        raise ValueError(
            f"{str(folder)!r} holds {kind} already: choose another folder, or move it away. Nothing was written."
        )


def merged_model(model: Any) -> PreTrainedModel:
    """A copy of the policy without PEFT: the adapter added into the weights of the base.

    A quantised base is loaded again in the precision of its checkpoint, since int8 and 4-bit weights cannot take the
    adapter up without rounding it away.

    Raises:
        ValueError: the base is sharded, or the copy gives other log-probs than the policy.
    """
    if model.is_sharded:
        raise ValueError("the base is sharded: save the adapter, load that in one process, and merge there.")
    if not model.is_peft_model:
        return model.pretrained_model
    if getattr(model.causal_lm, "is_quantized", False):
        with tempfile.TemporaryDirectory() as folder:
            save_folder(model, Path(folder))
            base = AutoModelForCausalLM.from_pretrained(model.config.name_or_path)
            if getattr(base, "is_quantized", False):  # the checkpoint itself is
                base = base.dequantize()
            fit_embeddings(base, Path(folder, ADAPTER_FILE))
            return PeftModel.from_pretrained(base, folder).merge_and_unload().eval()
    merged = copy.deepcopy(model.pretrained_model).merge_and_unload(
        adapter_names=[model.pretrained_model.active_adapter]
    )
    difference, tolerance = logprob_difference(model, merged)
    if not difference <= tolerance:
        raise ValueError(
            f"merging changes the policy's log-probs by {difference:.3g} nats. If LM head and embedding share weights "
            "and one of them is adapted, load the base with tie_word_embeddings=False before adding adapters."
        )
    return merged.eval()


def upload_folder(model: Any, repo_id: str, *, private: bool | None, token: str | None, **kwargs: Any) -> Any:
    """Upload what `save_folder` writes; arguments as in `AutoModelForCausalLMWithValueHead.push_to_hub`."""
    api = HfApi(token=token)
    repo_id = api.create_repo(repo_id, private=private, exist_ok=True).repo_id
    with tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(folder)
        return api.upload_folder(repo_id=repo_id, folder_path=folder, **kwargs)
