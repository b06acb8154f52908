"""Checking what a reward function returned: one number, one number per token, or None for each completion."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

MAX_REWARD = 1e18  # losses square it, in float32


@dataclass(frozen=True)
class Samples:
    """The completions that were judged, for messages and checks."""

    prompts: list[Any]
    completions: list[Any]
    lengths: list[int]  # tokens of each completion, the end token included

    def quote(self, index: int) -> str:
        """Prompt and completion, shortened."""
        return f"Prompt: {_short(self.prompts[index])} Completion: {_short(self.completions[index])}"


@dataclass(frozen=True)
class Output:
    """A reward function's rewards of B completions."""

    totals: Tensor  # (B,) float32, summed over tokens, NaN = None
    per_token: Tensor | None  # (B, T) float32, 0 where a number was given for the whole; None = always


def checked_output(name: str, output: Any, samples: Samples) -> Output:
    """What a reward function returned, as tensors.

    Args:
        name: of the function.
        output: a sequence of B entries: numbers, sequences of numbers (one per completion token), or None.
        samples: what was judged.

    Raises:
        TypeError: entries of another kind, or no sequence.
        ValueError: wrong counts, NaN, infinity, or numbers too large to square.
    """
    if hasattr(output, "tolist"):  # numpy arrays and torch tensors
        output = output.tolist()
    if isinstance(output, str | bytes | bytearray | dict) or not isinstance(output, Sequence):
        raise TypeError(
            f"reward function {name!r} must return a list with one number per completion, got "
            f"{type(output).__name__}: {output!r}."
        )
    count = len(samples.completions)
    if len(output) != count:
        raise ValueError(
            f"reward function {name!r} returned {len(output)} rewards for {count} completions: it must "
            "return exactly one for each."
        )
    totals, rows, any_per_token = [], [], False
    for i, reward in enumerate(output):
        if _is_per_token(reward):
            any_per_token = True
            rows.append(_token_numbers(name, i, reward, samples))
            totals.append(sum(rows[-1]))
        else:
            rows.append([])
            totals.append(_number(name, i, reward, samples))
    per_token = None
    if any_per_token:
        width = max(samples.lengths)
        per_token = torch.tensor([row + [0.0] * (width - len(row)) for row in rows], dtype=torch.float32)  # (B, T)
    return Output(torch.tensor(totals, dtype=torch.float32), per_token)


def refuse_silence(table: Tensor, names: list[str], samples: Samples) -> None:
    """Raise `ValueError` if every function said None of some completion; table is (B, number of functions)."""
    silent = table.isnan().all(-1).nonzero()
    if len(silent):
        i = int(silent[0])
        raise ValueError(
            f"no reward function applies to completion {i}: {names} all returned None. {samples.quote(i)} Return a "
            "number, e.g. 0.0, from at least one of them."
        )


def refuse_huge(scores: Tensor, names: list[str], samples: Samples) -> None:
    """Raise `ValueError` for scores (B,) whose square would overflow."""
    huge = (~(scores.abs() <= MAX_REWARD)).nonzero()
    if len(huge):
        i = int(huge[0])
        raise ValueError(
            f"the weighted sum of {names} for completion {i} is {float(scores[i]):g}, more than {MAX_REWARD:g} in "
            f"size: scale rewards or reward_weights down. {samples.quote(i)}"
        )


def _is_per_token(reward: Any) -> bool:
    if getattr(reward, "ndim", 0) > 0:  # numpy arrays and torch tensors
        return True
    return isinstance(reward, Sequence) and not isinstance(reward, str | bytes | bytearray)


def _token_numbers(name: str, index: int, reward: Any, samples: Samples) -> list[float]:
    numbers = reward.tolist() if hasattr(reward, "tolist") else list(reward)
    if len(numbers) != samples.lengths[index]:
        raise ValueError(
            f"reward function {name!r} returned {len(numbers)} numbers for the {samples.lengths[index]} tokens of "
            f"completion {index}: return one number, or one per id of completion_ids[{index}]. {samples.quote(index)}"
        )
    if None in numbers:
        raise ValueError(
            f"reward function {name!r} returned None for a token of completion {index}: a token without reward gets "
            f"0.0. {samples.quote(index)}"
        )
    return [_number(name, index, number, samples) for number in numbers]


def _number(name: str, index: int, reward: Any, samples: Samples) -> float:
    if reward is None:
        return math.nan
    if isinstance(reward, str | bytes):
        raise TypeError(
            f"reward function {name!r} returned the text {reward!r} for completion {index}. {samples.quote(index)}"
        )
    try:
        value = float(reward.item() if hasattr(reward, "item") else reward)  # numpy and torch scalars
    except OverflowError:
        value = math.inf
    except (TypeError, ValueError, RuntimeError) as error:
        raise TypeError(
            f"reward function {name!r} returned {type(reward).__name__} for completion {index}, not a number. "
            f"{samples.quote(index)}"
        ) from error
    if not abs(value) <= MAX_REWARD:
        raise ValueError(
            f"reward function {name!r} returned {value} for completion {index}: a reward must be finite and below "
            f"{MAX_REWARD:g} in size; for 'not applicable' return None. {samples.quote(index)}"
        )
    return value


def _short(value: Any, limit: int = 200) -> str:
    text = repr(value)
    return text if len(text) <= limit else f"{text[:limit]}... ({len(text)} characters)"
