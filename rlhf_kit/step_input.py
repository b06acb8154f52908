"""Checks of what a user's own loop hands to `PPOTrainer.generate` and `PPOTrainer.step`."""

from typing import Any

import torch
from torch import Tensor


def id_lists(name: str, tensors: Any, vocab_size: int) -> list[list[int]]:
    """Token ids given as tensors or lists, as lists.

    Raises:
        ValueError: one that is not one-dimensional and of integers, is empty, or holds an id outside the vocabulary.
    """
    rows = []
    for i, tensor in enumerate(tensors):
        if isinstance(tensor, str):
            raise ValueError(f"{name}[{i}] is text: pass token ids, e.g. torch.tensor(tokenizer(text).input_ids).")
        tensor = torch.as_tensor(tensor)
        if tensor.ndim != 1 or tensor.is_floating_point() or len(tensor) == 0:
            raise ValueError(
                f"{name}[{i}] must be a tensor of token ids of shape (n,) with n >= 1 (a completion holds at least "
                f"its end token), got shape {tuple(tensor.shape)}, {tensor.dtype}."
            )
        rows.append(tensor.tolist())
        if not (min(rows[-1]) >= 0 and max(rows[-1]) < vocab_size):
            raise ValueError(
                f"{name}[{i}] holds ids from {min(rows[-1])} to {max(rows[-1])}; the model's vocabulary has "
                f"{vocab_size} tokens."
            )
    return rows


def check_context(what: str, length: int, context_length: int | None) -> None:
    """Raise `ValueError` for a sequence that is longer than the model was built for."""
    if context_length is not None and length > context_length:
        raise ValueError(f"{what}: {length} tokens are more than the model's context of {context_length}.")


def checked_step(
    queries: Any,
    responses: Any,
    scores: Any,
    *,
    share: int,
    rollout_batch_size: int,
    vocab_size: int,
    context_length: int | None,
    stop_token_ids: list[int],
) -> tuple[list[list[int]], list[list[int]], Tensor]:
    """The arguments of `PPOTrainer.step` as ids and (share,) float32 scores.

    Raises:
        ValueError: a wrong number of them, ids that cannot be, or a score that is not finite.
    """
    prompt_ids = id_lists("queries", queries, vocab_size)
    completion_ids = id_lists("responses", responses, vocab_size)
    if not len(prompt_ids) == len(completion_ids) == share:
        raise ValueError(
            f"step() got {len(prompt_ids)} queries and {len(completion_ids)} responses; this process's share of "
            f"rollout_batch_size={rollout_batch_size} is {share}."
        )
    for i, (query, response) in enumerate(zip(prompt_ids, completion_ids, strict=True)):
        check_context(f"queries[{i}] with responses[{i}]", len(query) + len(response), context_length)
        ends = [t for t, token in enumerate(response[:-1]) if token in stop_token_ids]
        if ends:
            raise ValueError(
                f"responses[{i}] has {len(response)} tokens, but its first end token is number {ends[0] + 1}: cut it "
                "there. What follows an end token, padding too, was not chosen by the policy."
            )
    if isinstance(scores, int | float):
        raise ValueError(f"scores must hold one number per response, {share} here, got {scores}.")
    numbers = torch.tensor([float(score) for score in scores], dtype=torch.float32)
    if len(numbers) != share:
        raise ValueError(f"{len(numbers)} scores were given for {share} responses.")
    bad = (~numbers.isfinite()).nonzero().flatten().tolist()
    if bad:
        raise ValueError(f"scores[{bad[0]}] is {float(numbers[bad[0]])}: scores must be finite numbers.")
    return prompt_ids, completion_ids, numbers
