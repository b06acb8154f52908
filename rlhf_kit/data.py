"""Prompts: from a dataset in one of TRL's formats to token ids, in an order that depends on the seed alone.

A dataset row gives its prompt as text, as chat messages (the tokenizer's chat template is applied) or, by option, as
the first tokens of a raw "text" column. All other columns are kept and stay aligned with the prompt: reward functions
get them. Everything is tokenised and checked when the trainer is built, so a prompt that cannot be used is reported
before any weight changes. Masks come from lengths, never from comparing ids with the pad id: pad is often EOS.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from datasets import Dataset
from torch import Tensor
from transformers import PreTrainedTokenizerBase
from trl import apply_chat_template, is_conversational

TEMPLATE_COLUMNS = ("prompt", "tools", "chat_template_kwargs")  # what TRL's apply_chat_template reads


@dataclass(frozen=True)
class PromptBatch:
    """Some rows of a dataset: row i of each list belongs together.

    Attributes:
        prompts: what the dataset holds, text or messages. Reward functions see these.
        prompt_ids: token ids of each prompt, unpadded.
        columns: the other columns by name.
    """

    prompts: list[Any]
    prompt_ids: list[list[int]]
    columns: dict[str, list[Any]]

    def __len__(self) -> int:
        return len(self.prompts)

    def rows(self, indices: Sequence[int]) -> "PromptBatch":
        """The given rows, in the given order; one may be asked for several times."""
        return PromptBatch(
            prompts=[self.prompts[i] for i in indices],
            prompt_ids=[self.prompt_ids[i] for i in indices],
            columns={name: [values[i] for i in indices] for name, values in self.columns.items()},
        )


class PromptDataset:
    """A dataset's prompts, tokenised and checked.

    Args:
        dataset: a `datasets.Dataset` or a list of dicts, with a "prompt" column (text or messages), or a "text" column
            together with `text_prompt_length`.
        tokenizer: tokenises, and renders messages by its chat template.
        max_prompt_length: tokens; None = bounded by the context only.
        truncate_prompts: cut overlong prompts on the left instead of refusing them.
        text_prompt_length: use this many first tokens of "text" as the prompt.
        max_completion_length: tokens to leave room for.
        context_length: the model's longest sequence in tokens; None = unknown, not checked.

    Raises:
        TypeError: a dataset without random access, or a prompt that is neither text nor messages.
        ValueError: no rows, a missing column, an empty or an overlong prompt; with row and numbers.
    """

    def __init__(
        self,
        dataset: Dataset | list[dict[str, Any]],
        tokenizer: PreTrainedTokenizerBase,
        *,
        max_prompt_length: int | None = None,
        truncate_prompts: bool = False,
        text_prompt_length: int | None = None,
        max_completion_length: int,
        context_length: int | None = None,
    ):
        if not hasattr(dataset, "__getitem__") or not hasattr(dataset, "__len__") or isinstance(dataset, dict):
            raise TypeError(
                f"the dataset must be a datasets.Dataset or a list of dicts, got {type(dataset).__name__}. Of a "
                "dataset dict pass one split; of a streaming dataset, Dataset.from_list(list(stream.take(n)))."
            )
        if len(dataset) == 0:
            raise ValueError("the dataset has no rows.")
        self._dataset = dataset
        self._text_prompt_length = text_prompt_length
        first = dataset[0]
        self._source = "prompt" if text_prompt_length is None else "text"
        if self._source not in first:
            hint = " (or set text_prompt_length to use the start of 'text')" if "text" in first else ""
            raise ValueError(f"the dataset has no {self._source!r} column{hint}; it has {sorted(first)}.")
        self.column_names = [name for name in first if name != "prompt"]
        self._prompt_ids = [self._tokenize(i, dataset[i], tokenizer) for i in range(len(dataset))]
        limit = _limit(max_prompt_length, truncate_prompts, max_completion_length, context_length)
        self._refuse_empty()
        if truncate_prompts and limit is not None:
            self._prompt_ids = [ids[-limit:] for ids in self._prompt_ids]
        self._refuse_overlong(max_prompt_length, max_completion_length, context_length)
        self._tokenizer = tokenizer

    def __len__(self) -> int:
        return len(self._prompt_ids)

    def batch(self, indices: Sequence[int]) -> PromptBatch:
        """The given rows as a `PromptBatch`, in the given order."""
        rows = [self._dataset[int(i)] for i in indices]
        prompt_ids = [self._prompt_ids[int(i)] for i in indices]
        if self._source == "text":
            prompts = [self._tokenizer.decode(ids, skip_special_tokens=True) for ids in prompt_ids]
        else:
            prompts = [row["prompt"] for row in rows]
        columns = {name: [row[name] for row in rows] for name in self.column_names}
        return PromptBatch(prompts=prompts, prompt_ids=prompt_ids, columns=columns)

    def _tokenize(self, index: int, row: dict[str, Any], tokenizer: PreTrainedTokenizerBase) -> list[int]:
        value = row[self._source]
        if self._source == "text":
            if not isinstance(value, str):
                raise TypeError(f"row {index}: 'text' must be a string, got {type(value).__name__}.")
            return tokenizer(value).input_ids[: self._text_prompt_length]
        if isinstance(value, str):
            return tokenizer(value).input_ids
        if not is_conversational({"prompt": value}):
            raise TypeError(
                f"row {index}: 'prompt' must be text or a list of messages such as "
                f'{{"role": "user", "content": "..."}}, got {value!r}.'
            )
        if tokenizer.chat_template is None:
            raise ValueError(
                f"row {index} is a chat, but the tokenizer of {tokenizer.name_or_path!r} has no chat template: set "
                "tokenizer.chat_template, or give prompts as text."
            )
        rendered = apply_chat_template({k: row[k] for k in TEMPLATE_COLUMNS if k in row}, tokenizer)["prompt"]
        return tokenizer(rendered, add_special_tokens=False).input_ids  # the template wrote the special tokens

    def _refuse_empty(self) -> None:
        empty = [i for i, ids in enumerate(self._prompt_ids) if not ids]
        if empty:
            raise ValueError(
                f"{len(empty)} of {len(self)} prompts have no tokens, first in row {empty[0]}: remove these rows, or "
                "start them with the tokenizer's BOS token."
            )

    def _refuse_overlong(self, max_prompt_length: int | None, completion: int, context: int | None) -> None:
        lengths = [len(ids) for ids in self._prompt_ids]
        longest = int(np.argmax(lengths))
        n = lengths[longest]
        if max_prompt_length is not None and n > max_prompt_length:
            over = sum(length > max_prompt_length for length in lengths)
            raise ValueError(
                f"{over} of {len(self)} prompts are longer than max_prompt_length={max_prompt_length} tokens, the "
                f"longest ({n}) in row {longest}: raise it, remove these rows, or set truncate_prompts to keep their "
                "last tokens."
            )
        if context is not None and n + completion > context:
            raise ValueError(
                f"the longest prompt ({n} tokens, row {longest}) and max_completion_length={completion} need "
                f"{n + completion} tokens, more than the model's context of {context}: lower max_completion_length, "
                "remove long prompts, or set truncate_prompts to keep their last tokens."
            )


def _limit(max_prompt_length: int | None, truncate: bool, completion: int, context: int | None) -> int | None:
    """Tokens a prompt is cut to: the tighter of the user's bound and what the context leaves."""
    room = None if context is None else context - completion
    if truncate and room is not None and room < 1:
        raise ValueError(
            f"max_completion_length={completion} leaves no room for a prompt in the model's context of {context} "
            "tokens: lower it."
        )
    return min((limit for limit in (max_prompt_length, room) if limit is not None), default=None)


def prompt_order(*, seed: int, iteration: int, batch_size: int, num_prompts: int) -> list[int]:
    """Indices of the prompts of one iteration: a pure function, so a resumed run needs no state for it.

    The dataset is read in passes, each in a new random order; batches run on across the end of a pass.

    Args:
        seed: of the run.
        iteration: from 0.
        batch_size: prompts per iteration.
        num_prompts: size of the dataset.

    Returns:
        batch_size indices in [0, num_prompts).
    """
    positions = range(iteration * batch_size, (iteration + 1) * batch_size)
    passes = {p // num_prompts for p in positions}
    orders = {p: np.random.default_rng([seed, p]).permutation(num_prompts) for p in passes}
    return [int(orders[p // num_prompts][p % num_prompts]) for p in positions]


def pad_left(rows: list[list[int]], pad_id: int, *, length: int | None = None) -> tuple[Tensor, Tensor]:
    """Token ids with padding before them.

    Args:
        rows: B lists of ids.
        pad_id: stands in padding; its value never matters.
        length: width to pad to; None = the longest row.

    Returns:
        (ids (B, P) int64, mask (B, P) bool, True = real token).
    """
    width = max(map(len, rows)) if length is None else length
    ids = torch.full((len(rows), width), pad_id)
    mask = torch.zeros((len(rows), width), dtype=torch.bool)
    for i, row in enumerate(rows):
        if row:
            ids[i, -len(row) :] = torch.tensor(row)
            mask[i, -len(row) :] = True
    return ids, mask


def pad_right(rows: list[list[int]], pad_id: int) -> tuple[Tensor, Tensor]:
    """Token ids with padding after them; otherwise as `pad_left`."""
    ids, mask = pad_left([row[::-1] for row in rows], pad_id)
    return ids.flip(-1), mask.flip(-1)
