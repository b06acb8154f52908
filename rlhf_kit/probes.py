"""Forward passes on a handful of tokens that show, before training, what training on this model would get wrong.

`model` is an `AutoModelForCausalLMWithValueHead` everywhere.
"""

import warnings
from typing import Any

import torch
from peft.utils import ModulesToSaveWrapper
from torch import Tensor, nn
from transformers import GenerationConfig

from rlhf_kit.functional import full_kl
from rlhf_kit.scoring import generation_config

LENGTH = 8  # tokens of a probe


def adapters_change_model(model: Any) -> bool:
    """Whether the model with adapters is another than its bare base."""
    trained = _trained_token_ids(model)
    ids = torch.tensor([[*trained, *range(LENGTH)]], device=model.device) % model.vocab_size  # (1, S)
    return _reference_difference(model, ids) > 0 or _rows_are_trained(model)


def warn_of_distant_reference(model: Any) -> None:
    """Warn if policy and reference differ on some tokens before anything was trained, and by how much."""
    ids = torch.arange(LENGTH, device=model.device)[None] % model.vocab_size  # (1, S)
    mask = torch.ones_like(ids)
    with torch.no_grad():
        policy, _ = model.score(ids, mask, completion_length=LENGTH - 1)
    kl = float(full_kl(policy.float(), model.score_reference(ids, mask, completion_length=LENGTH - 1).float()).mean())
    if kl > 1e-6:
        warnings.warn(
            f"the policy starts {kl:.3g} nats per token away from its reference (on {LENGTH} probe tokens): the KL "
            "penalty pulls it there from the first iteration. To start at KL 0, drop ref_model, or the adapter called "
            "'reference' that an earlier run left on the model.",
            stacklevel=2,
        )


def refuse_other_generation(model: Any) -> None:
    """Raise `ValueError` if tokens are sampled from other probabilities than the scoring pass gives them.

    Two prompts of different lengths are continued with the cache on, as rollouts do it.
    """
    ids = torch.arange(1, 2 * LENGTH + 1, device=model.device).view(2, LENGTH) % model.vocab_size  # (2, P)
    mask = torch.ones_like(ids)
    mask[0, :3] = 0
    config = GenerationConfig(max_new_tokens=3, min_new_tokens=3, do_sample=False, output_logits=True, pad_token_id=0,
                              return_dict_in_generate=True)  # fmt: skip
    with model.sampling_mode(), generation_config(model.causal_lm, config):
        made = model.causal_lm.generate(
            input_ids=ids, attention_mask=mask, generation_config=config, synced_gpus=model.is_sharded
        )
    generated = torch.stack(made.logits, dim=1)  # (2, T, V)
    mask = torch.cat([mask, torch.ones_like(mask[:, :3])], dim=1)
    with torch.no_grad():
        scored, _ = model.score(made.sequences, mask, completion_length=3)
    difference = _typical_difference(scored, generated)
    if not difference < _tolerance(model):
        raise ValueError(
            f"{type(model.causal_lm).__name__} samples from other probabilities than a plain forward pass gives, by "
            f"{difference:.3g} nats (its cache, or how it treats padding), so the wrong ones would be trained. It is "
            "not supported."
        )


def logprob_difference(model: Any, other: nn.Module) -> tuple[float, float]:
    """Difference of log-probs between the policy and a plain causal LM, and how much of it rounding may explain."""
    ids = torch.arange(1, LENGTH + 1, device=model.device)[None] % model.vocab_size  # (1, S)
    with torch.no_grad():
        policy, _ = model.score(ids, torch.ones_like(ids), completion_length=LENGTH - 1)
        logits = other.eval()(input_ids=ids).logits[:, :-1]
    return _typical_difference(policy, logits), _tolerance(model)


def _reference_difference(model: Any, ids: Tensor) -> float:
    mask = torch.ones_like(ids)
    with torch.no_grad():
        policy, _ = model.score(ids, mask, completion_length=ids.shape[1] - 1)
    reference = model.score_reference(ids, mask, completion_length=ids.shape[1] - 1)
    return float((policy - reference).abs().max())


def refuse_wrong_padding(model: Any) -> None:
    """Raise `ValueError` if padding before a prompt changes the log-probs of what follows it."""
    ids = torch.arange(1, LENGTH + 1, device=model.device)[None] % model.vocab_size  # (1, S)
    mask = torch.ones_like(ids)
    padding = ids[:, -3:]  # not the pad token, whose embedding may be zero and so hide that it is read
    hidden = torch.zeros_like(padding)
    with torch.no_grad():
        plain, _ = model.score(ids, mask, completion_length=4)
        padded, _ = model.score(torch.cat([padding, ids], 1), torch.cat([hidden, mask], 1), completion_length=4)
    typical = _typical_difference(plain, padded)
    if not typical < _tolerance(model):
        raise ValueError(
            f"{type(model.causal_lm).__name__} gives other log-probabilities when a prompt is padded on the left (by "
            f"{typical:.3g} nats), so batches of prompts of different lengths would be scored wrongly. It is not "
            "supported."
        )


def _rows_are_trained(model: Any) -> bool:
    """Whether embeddings changed in rows that a probe need not meet: adapters of them, or trained copies."""
    for module in model.pretrained_model.modules():
        if isinstance(module, ModulesToSaveWrapper):
            original = dict(module.original_module.named_parameters())
            for copied in module.modules_to_save.values():
                if any(not torch.equal(p, original[name]) for name, p in copied.named_parameters()):
                    return True
    return any(p.any() for name, p in model.pretrained_model.named_parameters() if "lora_embedding_A" in name)


def _typical_difference(logits: Tensor, others: Tensor) -> float:
    """Difference of log-probs, weighted as sampling would, at the position where it is largest; nats."""
    difference = (logits.float().log_softmax(-1) - others.float().log_softmax(-1)).abs()
    return float((difference * logits.float().softmax(-1)).sum(-1).max())


def _tolerance(model: Any) -> float:
    """What rounding may explain of such a difference, nats."""
    return 1e-3 if next(model.causal_lm.parameters()).dtype == torch.float32 else 0.3


def _trained_token_ids(model: Any) -> list[int]:
    """Tokens whose embeddings are adapted by themselves (PEFT's trainable_token_indices)."""
    ids: list[int] = []
    for config in model.pretrained_model.peft_config.values():
        indices = getattr(config, "trainable_token_indices", None) or []
        for part in indices.values() if isinstance(indices, dict) else [indices]:
            ids += part
    return ids
