"""Forward passes on a handful of tokens that show, before training, what training on this model would get wrong.

`model` is an `AutoModelForCausalLMWithValueHead` everywhere.
"""

from typing import Any

import torch
from peft.utils import ModulesToSaveWrapper

LENGTH = 8  # tokens of a probe


def refuse_trained_adapters(model: Any) -> None:
    """Raise `ValueError` if the adapters change the model: without them it is not what training starts from."""
    trained = _trained_token_ids(model)
    ids = torch.tensor([[*trained, *range(LENGTH)]], device=model.device) % _vocab_size(model)  # (1, S)
    mask = torch.ones_like(ids)
    with torch.no_grad():
        policy, _ = model.score(ids, mask, completion_length=ids.shape[1] - 1)
    reference = model.score_reference(ids, mask, completion_length=ids.shape[1] - 1)
    difference = float((policy - reference).abs().max())
    if difference > 0 or _rows_are_trained(model):
        raise ValueError(
            f"the adapters change the model already (logits by up to {difference:.3g}), so with adapters off the "
            "reference would be the bare base, not the model that training starts from. Merge them first "
            "(model = model.merge_and_unload()) and pass peft_config for new ones, or pass ref_model."
        )


def refuse_wrong_padding(model: Any) -> None:
    """Raise `ValueError` if padding before a prompt changes the log-probs of what follows it."""
    ids = torch.arange(1, LENGTH + 1, device=model.device)[None] % _vocab_size(model)  # (1, S)
    mask = torch.ones_like(ids)
    padding = torch.zeros_like(ids[:, :3])
    with torch.no_grad():
        plain, _ = model.score(ids, mask, completion_length=4)
        padded, _ = model.score(torch.cat([padding, ids], 1), torch.cat([padding, mask], 1), completion_length=4)
    difference = (plain.float().log_softmax(-1) - padded.float().log_softmax(-1)).abs()
    typical = float((difference * plain.float().softmax(-1)).sum(-1).max())  # weighted as sampling would
    exact = next(model.causal_lm.parameters()).dtype == torch.float32
    if not typical < (1e-3 if exact else 0.3):
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


def _vocab_size(model: Any) -> int:
    return int(model.config.get_text_config().vocab_size)


def _trained_token_ids(model: Any) -> list[int]:
    """Tokens whose embeddings are adapted by themselves (PEFT's trainable_token_indices)."""
    ids: list[int] = []
    for config in model.pretrained_model.peft_config.values():
        indices = getattr(config, "trainable_token_indices", None) or []
        for part in indices.values() if isinstance(indices, dict) else [indices]:
            ids += part
    return ids
