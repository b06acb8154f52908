"""Tiny models and a tiny tokenizer, built here: no test reaches a network."""

import os

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

import pytest
import torch
from peft import LoraConfig
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import (
    AutoModelForCausalLM,
    Gemma3TextConfig,
    GPT2Config,
    GPTNeoXConfig,
    LlamaConfig,
    OPTConfig,
    PreTrainedTokenizerFast,
    Qwen3Config,
)

TEXTS = [
    "The quick brown fox jumps over the lazy dog. It was a sunny day.",
    "She sells sea shells by the sea shore. He reads a book in the garden.",
    "One small step for a man, one giant leap for mankind. Hello, world!",
]

SMALL = {"hidden_size": 32, "num_attention_heads": 4, "num_hidden_layers": 2, "max_position_embeddings": 128}
FAMILIES = {
    "gpt2": (GPT2Config, {"n_embd": 32, "n_head": 4, "n_layer": 2, "n_positions": 128}),
    "opt": (OPTConfig, {**SMALL, "ffn_dim": 64, "word_embed_proj_dim": 32}),
    "gpt_neox": (GPTNeoXConfig, {**SMALL, "intermediate_size": 64}),
    "llama": (LlamaConfig, {**SMALL, "intermediate_size": 64, "num_key_value_heads": 2}),
    "qwen3": (Qwen3Config, {**SMALL, "intermediate_size": 64, "num_key_value_heads": 2, "head_dim": 8}),
    "gemma3": (Gemma3TextConfig, {**SMALL, "intermediate_size": 64, "num_key_value_heads": 2, "head_dim": 8}),
}


def make_tokenizer():
    """Byte-level BPE with 300 tokens; pad is EOS (id 0), as in GPT-2."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=300,
        special_tokens=["<eos>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(TEXTS, trainer)
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<eos>", pad_token="<eos>")


def make_model(family="gpt2", *, vocab_size=300, seed=0, scale=10.0, **overrides):
    """A small random causal LM. Its LM head is scaled up, so that the distribution is far from uniform."""
    config_class, sizes = FAMILIES[family]
    torch.manual_seed(seed)
    special = {"bos_token_id": 0, "eos_token_id": 0, "pad_token_id": 0}
    config = config_class(**{**sizes, "vocab_size": vocab_size, **special, **overrides})
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    with torch.no_grad():
        model.get_output_embeddings().weight.mul_(scale)
    return model


LORA_TARGETS = {
    "gpt2": ["c_attn"],
    "opt": ["q_proj", "v_proj"],
    "gpt_neox": ["query_key_value"],
    "llama": ["q_proj", "v_proj"],
    "qwen3": ["q_proj", "v_proj"],
    "gemma3": ["q_proj", "v_proj"],
}


def make_lora(family="gpt2", **overrides):
    """LoRA on the attention of a family; freshly made adapters change nothing."""
    settings = {"r": 4, "lora_alpha": 8, "target_modules": LORA_TARGETS[family], "task_type": "CAUSAL_LM"}
    if family == "gpt2":
        settings["fan_in_fan_out"] = True
    return LoraConfig(**{**settings, **overrides})


@pytest.fixture(scope="session")
def tokenizer():
    return make_tokenizer()


@pytest.fixture
def config_factory(tmp_path):
    """PPOConfig with small sizes; keyword arguments override."""
    from rlhf_kit import PPOConfig

    def make(**overrides):
        settings = {
            "output_dir": str(tmp_path / "run"),
            "rollout_batch_size": 8,
            "mini_batch_size": 4,
            "micro_batch_size": 2,
            "ppo_epochs": 2,
            "num_iterations": 2,
            "max_completion_length": 6,
            "learning_rate": 1e-3,
            "lr_scheduler_type": "constant",
            "save_every": None,
        }
        return PPOConfig(**{**settings, **overrides})

    return make


@pytest.fixture
def one_thread():
    """Tiny tensors: a second thread only costs."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)
