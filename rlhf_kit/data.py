"""Prompts: from a dataset in one of TRL's formats to token ids, in an order that depends on the seed alone.

A dataset row gives its prompt as text, as chat messages (the tokenizer's chat template is applied) or, by option, as
the first tokens of a raw "text" column. All other columns are kept and stay aligned with the prompt: reward functions
get them. Everything is tokenised and checked when the trainer is built, so a prompt that cannot be used is reported
before any weight changes. Masks come from lengths, never from comparing ids with the pad id: pad is often EOS.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from datasets import Dataset
from jinja2 import TemplateError
from torch import Tensor
from transformers import PreTrainedTokenizerBase
from trl import apply_chat_template, is_conversational

from rlhf_kit.fingerprint import digest


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
        vocab_size: number of tokens the model knows; None = not checked.

    Attributes:
        column_names: the columns besides the prompt.
        prompt_ids: of every row, unpadded.

    Raises:
        TypeError: a dataset without random access, or a prompt that is neither text nor messages.
        ValueError: no rows, rows that differ in columns or in kind, an empty or an overlong prompt, a token the model
            does not know; with row and numbers.
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
        vocab_size: int | None = None,
    ):
        if not isinstance(dataset, Dataset | list | tuple):
            raise TypeError(
                f"the dataset must be a datasets.Dataset or a list of dicts, got {type(dataset).__name__}. Of a "
                "dataset dict pass one split; of a streaming dataset, Dataset.from_list(list(stream.take(n))); of a "
                "DataFrame, Dataset.from_pandas(frame)."
            )
        if len(dataset) == 0:
            raise ValueError("the dataset has no rows.")
        self._dataset = dataset
        self._tokenizer = tokenizer
        self._text_prompt_length = text_prompt_length
        self._source = "prompt" if text_prompt_length is None else "text"
        columns = self._checked_columns()
        self.column_names = [name for name in columns if name != "prompt" or self._source == "text"]
        self.prompt_ids = [self._tokenize(i, row) for i, row in enumerate(dataset)]
        self._refuse_empty()
        self._refuse_unknown(vocab_size)
        limit = _limit(max_prompt_length, truncate_prompts, max_completion_length, context_length)
        if limit is not None:
            self.prompt_ids = [ids[-limit:] for ids in self.prompt_ids]
        self._refuse_overlong(max_prompt_length, max_completion_length, context_length)

    def __len__(self) -> int:
        return len(self.prompt_ids)

    def columns_digest(self) -> str:
        """Digest of the columns besides the prompt, which reward functions may read; objects count by their type."""
        rows = [[row[name] for name in self.column_names] for row in self._dataset]
        return digest(json.dumps([self.column_names, rows], default=lambda thing: type(thing).__name__))

    def batch(self, indices: Sequence[int]) -> PromptBatch:
        """The given rows as a `PromptBatch`, in the given order."""
        rows = [self._dataset[int(i)] for i in indices]
        prompt_ids = [self.prompt_ids[int(i)] for i in indices]
        if self._source == "text":
            prompts = [self._tokenizer.decode(ids, skip_special_tokens=True) for ids in prompt_ids]
        else:
            prompts = [row["prompt"] for row in rows]
        columns = {name: [row[name] for row in rows] for name in self.column_names}
        return PromptBatch(prompts=prompts, prompt_ids=prompt_ids, columns=columns)

    def _checked_columns(self) -> list[str]:
        """The columns that every row has."""
        first = self._dataset[0]
        for i, row in enumerate(self._dataset if isinstance(self._dataset, list | tuple) else [first]):
            if not isinstance(row, dict):
                raise TypeError(
                    f'row {i} must be a dict such as {{"prompt": "..."}}, got {type(row).__name__}: {row!r}.'
                )
            if self._source not in row:
                hint = " (or set text_prompt_length to use the start of 'text')" if "text" in row else ""
                raise ValueError(f"row {i} has no {self._source!r} column{hint}; it has {sorted(row)}.")
            if row.keys() != first.keys():
                raise ValueError(
                    f"row {i} has the columns {sorted(row)}, but row 0 has {sorted(first)}: make them equal."
                )
        return list(first)

    def _tokenize(self, index: int, row: dict[str, Any]) -> list[int]:
        value = row[self._source]
        if isinstance(value, str):
            if self._source == "prompt" and not isinstance(self._dataset[0]["prompt"], str):
                raise ValueError(
                    f"row {index} is text but row 0 is a chat: give all prompts as text or all as messages."
                )
            return self._ids(index, value)[: self._text_prompt_length]
        if self._source == "text":
            raise TypeError(f"row {index}: 'text' must be a string, got {type(value).__name__}.")
        if not (isinstance(value, list) and value and is_conversational({"prompt": value})):
            raise TypeError(
                f"row {index}: 'prompt' must be text or a list of messages such as "
                f'{{"role": "user", "content": "..."}}, got {value!r}.'
            )
        if isinstance(self._dataset[0]["prompt"], str):
            raise ValueError(f"row {index} is a chat but row 0 is text: give all prompts as text or all as messages.")
        return self._tokenize_chat(index, row)

    def _tokenize_chat(self, index: int, row: dict[str, Any]) -> list[int]:
        tokenizer = self._tokenizer
        if tokenizer.chat_template is None:
            name = f" of {tokenizer.name_or_path!r}" if tokenizer.name_or_path else ""
            raise ValueError(
                f"row {index} is a chat, but the tokenizer{name} has no chat template: set tokenizer.chat_template, "
                "or give prompts as text."
            )
        try:
            rendered = apply_chat_template(
                {"prompt": row["prompt"]},
                tokenizer,
                tools=row.get("tools"),
                **(row.get("chat_template_kwargs") or {}),
            )["prompt"]
        except (ValueError, TypeError, KeyError, TemplateError) as error:
            raise ValueError(f"row {index}: the chat template cannot render {row['prompt']!r}: {error!r}") from error
        return self._ids(index, rendered, add_special_tokens=False)  # the template wrote the special tokens

    def _ids(self, index: int, text: str, **kwargs: Any) -> list[int]:
        try:
            return self._tokenizer(text, **kwargs).input_ids
        except (TypeError, ValueError) as error:
            raise ValueError(f"row {index}: the tokenizer cannot read {text!r}: {error}") from error

    def _refuse_empty(self) -> None:
        empty = [i for i, ids in enumerate(self.prompt_ids) if not ids]
        if empty:
            raise ValueError(
                f"{len(empty)} of {len(self)} prompts have no tokens, first in row {empty[0]}: remove these rows, or "
                "start them with the tokenizer's BOS token."
            )

    def _refuse_unknown(self, vocab_size: int | None) -> None:
        for i, ids in enumerate(self.prompt_ids):
            if vocab_size is not None and max(ids) >= vocab_size:
                raise ValueError(
                    f"row {i} has token id {max(ids)}, but the model knows {vocab_size} tokens: is this its tokenizer?"
                )

    def _refuse_overlong(self, max_prompt_length: int | None, completion: int, context: int | None) -> None:
        lengths = [len(ids) for ids in self.prompt_ids]
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
                f"or {self._shorter_prompts(context - completion)}."
            )

    def _shorter_prompts(self, room: int) -> str:
        if room < 1:
            return "use a model with a longer context"
        if self._source == "text":
            return f"lower text_prompt_length to {room}"
        return "remove long prompts, or set truncate_prompts to keep their last tokens"


def _limit(max_prompt_length: int | None, truncate: bool, completion: int, context: int | None) -> int | None:
    """Tokens a prompt is cut to: the tighter of the user's bound and what the context leaves; None = not cut."""
    if not truncate:
        return None
    room = None if context is None else context - completion
    if room is not None and room < 1:
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
