"""Checks of what a user's own loop hands to `PPOTrainer.generate` and `PPOTrainer.step`."""

import math
import warnings
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor


def id_lists(name: str, tensors: Any, vocab_size: int) -> list[list[int]]:
    """Token ids given as tensors or lists, as lists.

    Raises:
        ValueError: none, or one that is not one-dimensional and of integers, is empty, or holds an id outside the
            vocabulary.
    """
    if isinstance(tensors, str | Mapping) or not hasattr(tensors, "__iter__") or len(tensors) == 0:
        raise ValueError(
            f"{name} must be a list with the token ids of one text each, without padding, got "
            f"{tensors if isinstance(tensors, str) else type(tensors).__name__}"
            f"{', which is empty' if hasattr(tensors, '__len__') and len(tensors) == 0 else ''}: pass "
            "[torch.tensor(ids) for ids in tokenizer(texts).input_ids]."
        )
    rows = []
    for i, tensor in enumerate(tensors):
        if isinstance(tensor, str):
            raise ValueError(f"{name}[{i}] is text: pass token ids, e.g. torch.tensor(tokenizer(text).input_ids).")
        try:
            tensor = torch.as_tensor(tensor)
        except (TypeError, ValueError, RuntimeError) as error:
            raise ValueError(f"{name}[{i}] holds no token ids but {tensor!r}: {error}.") from error
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
    if all(response[: len(query)] == query for query, response in zip(prompt_ids, completion_ids, strict=True)):
        warnings.warn(
            "every response begins with its query: if they were joined, pass the completions alone, as generate "
            "gives them, or the policy is trained on the prompts too.",
            stacklevel=3,
        )
    return prompt_ids, completion_ids, _checked_scores(scores, share)


def _checked_scores(scores: Any, share: int) -> Tensor:
    if not hasattr(scores, "__iter__") or isinstance(scores, str):
        raise ValueError(f"scores must hold one number per response, {share} here, got {scores!r}.")
    values = list(scores)
    if len(values) != share:
        raise ValueError(f"{len(values)} scores were given for {share} responses.")
    for i, value in enumerate(values):
        try:
            values[i] = math.nan if isinstance(value, str | bytes) else float(value)
        except (TypeError, ValueError, RuntimeError):
            values[i] = math.nan
        if not math.isfinite(values[i]):
            raise ValueError(f"scores[{i}] is {value!r}: each score must be one finite number.")
    return torch.tensor(values, dtype=torch.float32)
