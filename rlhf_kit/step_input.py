"""Checks of what a user's own loop hands to `PPOTrainer.generate` and `PPOTrainer.step`."""

import math
import warnings
from collections.abc import Mapping
from typing import Any

import torch

from rlhf_kit.reward_output import MAX_REWARD
from rlhf_kit.rewards import Rewards


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
) -> tuple[list[list[int]], list[list[int]], Rewards]:
    """The arguments of `PPOTrainer.step` as ids of `share` prompts, of as many completions, and their rewards.

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
    return prompt_ids, completion_ids, _checked_scores(scores, completion_ids)


def _checked_scores(scores: Any, completion_ids: list[list[int]]) -> Rewards:
    count = len(completion_ids)
    if not hasattr(scores, "__iter__") or isinstance(scores, str):
        raise ValueError(f"scores must hold one number per response, {count} here, got {scores!r}.")
    scores = list(scores)
    if len(scores) != count:
        raise ValueError(f"{len(scores)} scores were given for {count} responses.")
    per_token = [isinstance(score, list | tuple) or getattr(score, "ndim", 0) == 1 for score in scores]
    rows = [_numbers(i, score if per_token[i] else [score]) for i, score in enumerate(scores)]
    for i, row in enumerate(rows):
        if per_token[i] and len(row) != len(completion_ids[i]):
            raise ValueError(
                f"scores[{i}] holds {len(row)} numbers for the {len(completion_ids[i])} tokens of responses[{i}]: "
                "give one per token, or one number for the whole."
            )
    width = max(map(len, completion_ids))
    token_rows = [[*(row if own else []), *[0.0] * width][:width] for row, own in zip(rows, per_token, strict=True)]
    totals = torch.tensor([math.fsum(row) for row in rows], dtype=torch.float32)
    return Rewards(totals, torch.tensor(token_rows, dtype=torch.float32) if any(per_token) else None)


def _numbers(index: int, values: Any) -> list[float]:
    numbers = []
    for value in values:
        try:
            numbers.append(math.nan if isinstance(value, str | bytes) else float(value))
        except (TypeError, ValueError, RuntimeError, OverflowError):
            numbers.append(math.nan)
        if not abs(numbers[-1]) <= MAX_REWARD:
            raise ValueError(
                f"scores[{index}] is {value!r}: a score must be a finite number, or one per token, of at most "
                f"{MAX_REWARD:g} in size."
            )
    return numbers
