"""Reward functions: calling them with TRL's signature, checking what comes back, weighting it into one score.

    def reward(prompts, completions, completion_ids, **columns) -> list[float | None]

`prompts` and `completions` are what a reader would see: no padding, no special tokens, no prompt in the completion; a
chat prompt gets its completion as [{"role": "assistant", "content": text}]. `completion_ids` are the sampled ids, end
token included. `columns` are the dataset's other columns, row-aligned, and `trainer_state`. A function without
`**kwargs` gets only the arguments it names. None means "not applicable to this completion". Functions may be async:
they then run concurrently.
"""

import asyncio
import copy
import inspect
import math
from collections.abc import Callable, Sequence
from functools import partial
from itertools import count
from threading import Thread
from typing import Any

import torch
from torch import Tensor, nn

RewardFunc = Callable[..., Any]

CHAT_HINT = " Prompts are chats, so each completion is a list of messages: its text is completion[0]['content']."
MAX_REWARD = 1e18  # losses square it, in float32
ALWAYS_GIVEN = ("prompts", "completions", "completion_ids", "trainer_state")


class RewardFunctions:
    """One or several reward functions, called as one.

    Args:
        funcs: a callable or a list of them.
        weights: one per function; None = 1 for each.
        column_names: the dataset's columns, to check the functions' arguments before anything runs. None = unchecked.

    Attributes:
        names: of the functions, made unique; they name the metrics `reward/<name>`.

    Raises:
        TypeError: something that cannot be called.
        ValueError: no function, a wrong number of weights, an argument that no column provides, or a column named
            like an argument that is always given.
    """

    def __init__(
        self,
        funcs: RewardFunc | Sequence[RewardFunc],
        *,
        weights: Sequence[float] | None = None,
        column_names: Sequence[str] | None = None,
    ):
        self._funcs = list(funcs) if isinstance(funcs, list | tuple) else [funcs]
        if not self._funcs:
            raise ValueError("reward_funcs is an empty list: give at least one function.")
        for i, func in enumerate(self._funcs):
            if isinstance(func, nn.Module) or not callable(func):
                raise TypeError(
                    f"reward_funcs[{i}] must be a function (prompts, completions, completion_ids, **columns) -> list "
                    f"of floats, got {type(func).__name__}. Wrap a reward model in such a function."
                )
        if weights is not None and len(weights) != len(self._funcs):
            raise ValueError(
                f"reward_weights has {len(weights)} entries for {len(self._funcs)} reward functions: give one each."
            )
        weights = [1.0] * len(self._funcs) if weights is None else list(weights)
        if not all(map(math.isfinite, weights)):
            raise ValueError(f"reward_weights must be finite, got {weights}.")
        self._weights = torch.tensor(weights, dtype=torch.float32)
        self.names = _unique([_name(func) for func in self._funcs])
        self._parameters = [_named_parameters(func) for func in self._funcs]
        self._loop: asyncio.AbstractEventLoop | None = None
        if column_names is not None:
            self.check_arguments(column_names)

    def __call__(
        self,
        *,
        prompts: list[Any],
        completions: list[Any],
        completion_ids: list[list[int]],
        columns: dict[str, list[Any]],
        trainer_state: Any = None,
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """Score completions.

        Args:
            prompts: B prompts as in the dataset.
            completions: B texts, or B one-message lists for chats.
            completion_ids: B lists of ids.
            columns: other dataset columns, each with B values.
            trainer_state: passed on to the functions.

        Returns:
            (scores (B,) float32 = weighted sum over the functions, {name: (B,) float32, NaN where it said None}).

        Raises:
            TypeError: a function returned something else than one number per completion.
            ValueError: a wrong number of rewards, NaN or infinity, or a completion on which every function said None;
                naming the function and the completion.
            Exception: whatever a function raises, with a note that says which function it was.
        """
        given = {
            **columns,
            "prompts": prompts,
            "completions": completions,
            "completion_ids": completion_ids,
            "trainer_state": trainer_state,
        }
        outputs = self._call_all(given, len(prompts))
        by_name = {
            name: _checked(name, output, prompts, completions)
            for name, output in zip(self.names, outputs, strict=True)
        }
        table = torch.stack(list(by_name.values()), dim=-1)  # (B, number of functions)
        silent = table.isnan().all(-1).nonzero()
        if len(silent):
            i = int(silent[0])
            raise ValueError(
                f"no reward function applies to completion {i}: {self.names} all returned None. "
                f"{_sample(prompts[i], completions[i])} Return a number, e.g. 0.0, from at least one of them."
            )
        scores = (table.nan_to_num(0.0) * self._weights).sum(-1)  # (B,)
        if not (scores.abs() <= MAX_REWARD).all():
            i = int((~(scores.abs() <= MAX_REWARD)).nonzero()[0])
            raise ValueError(
                f"the weighted sum of {self.names} for completion {i} is {float(scores[i]):g}, more than "
                f"{MAX_REWARD:g} in size: scale rewards or reward_weights down. {_sample(prompts[i], completions[i])}"
            )
        return scores, by_name

    def _call_all(self, given: dict[str, Any], batch_size: int) -> list[Any]:
        outputs: list[Any] = []
        for name, func, parameters in zip(self.names, self._funcs, self._parameters, strict=True):
            try:
                outputs.append(func(**_own_copies(given, parameters)))
            except Exception as error:
                _close(outputs)
                chat = "" if isinstance(given["completions"][0], str) else CHAT_HINT
                error.add_note(f"raised by reward function {name!r} on {batch_size} completions.{chat}")
                raise
        if any(inspect.isawaitable(output) for output in outputs):
            outputs = asyncio.run_coroutine_threadsafe(_gather(self.names, outputs), self._event_loop()).result()
        return outputs

    def _event_loop(self) -> asyncio.AbstractEventLoop:
        """One loop for the whole run, so that HTTP clients live on, in a thread, so that notebooks have theirs."""
        if self._loop is None:
            self._loop = asyncio.new_event_loop()
            Thread(target=self._loop.run_forever, name="rewards", daemon=True).start()
        return self._loop

    def check_arguments(self, column_names: Sequence[str]) -> None:
        """Raise `ValueError` if a dataset with these columns lacks an argument, or has one of a name that is taken."""
        clash = sorted(set(column_names) & set(ALWAYS_GIVEN))
        if clash:
            raise ValueError(f"dataset columns {clash} have the names of reward function arguments: rename them.")
        known = {*column_names, *ALWAYS_GIVEN}
        for name, func in zip(self.names, self._funcs, strict=True):
            missing = [p for p in _required_parameters(func) if p not in known]
            if missing:
                raise ValueError(
                    f"reward function {name!r} needs {missing}, but the dataset's columns are {sorted(column_names)}."
                )


async def _gather(names: list[str], outputs: list[Any]) -> list[Any]:
    async def finish(name: str, output: Any) -> Any:
        if not inspect.isawaitable(output):
            return output
        try:
            return await output
        except Exception as error:
            error.add_note(f"raised by reward function {name!r}.")
            raise

    return await asyncio.gather(*(finish(n, o) for n, o in zip(names, outputs, strict=True)))


def _close(outputs: list[Any]) -> None:
    """Drop coroutines that will never run, so that Python does not warn about them."""
    for output in outputs:
        if inspect.iscoroutine(output):
            output.close()


def _checked(name: str, output: Any, prompts: list[Any], completions: list[Any]) -> Tensor:
    """One reward function's output as (B,) float32, NaN where it said None."""
    if hasattr(output, "tolist"):  # numpy arrays and torch tensors
        output = output.tolist()
    if isinstance(output, str | bytes | bytearray | dict) or not isinstance(output, Sequence):
        raise TypeError(
            f"reward function {name!r} must return a list with one number per completion, got "
            f"{type(output).__name__}: {output!r}."
        )
    if len(output) != len(completions):
        raise ValueError(
            f"reward function {name!r} returned {len(output)} rewards for {len(completions)} completions: it must "
            "return exactly one for each."
        )
    numbers = [_number(name, i, r, prompts[i], completions[i]) for i, r in enumerate(output)]
    return torch.tensor(numbers, dtype=torch.float32)


def _number(name: str, index: int, reward: Any, prompt: Any, completion: Any) -> float:
    if reward is None:
        return math.nan
    sample = _sample(prompt, completion)
    if isinstance(reward, str | bytes):
        raise TypeError(f"reward function {name!r} returned the text {reward!r} for completion {index}. {sample}")
    try:
        value = float(reward.item() if hasattr(reward, "item") else reward)  # numpy and torch scalars
    except OverflowError:
        value = math.inf
    except (TypeError, ValueError, RuntimeError) as error:
        raise TypeError(
            f"reward function {name!r} returned {type(reward).__name__} for completion {index}, not a number. {sample}"
        ) from error
    if not abs(value) <= MAX_REWARD:
        raise ValueError(
            f"reward function {name!r} returned {value} for completion {index}: a reward must be finite and below "
            f"{MAX_REWARD:g} in size; for 'not applicable' return None. {sample}"
        )
    return value


def _sample(prompt: Any, completion: Any) -> str:
    return f"Prompt: {_short(prompt)} Completion: {_short(completion)}"


def _short(value: Any, limit: int = 200) -> str:
    text = repr(value)
    return text if len(text) <= limit else f"{text[:limit]}... ({len(text)} characters)"


def _name(func: RewardFunc) -> str:
    while isinstance(func, partial):
        func = func.func
    name = getattr(func, "__name__", type(func).__name__)
    return "lambda" if name == "<lambda>" else name


def _unique(names: list[str]) -> list[str]:
    """Names that occur several times get a number: f, g, f -> f_0, g, f_1."""
    taken = {name for name in names if names.count(name) == 1}
    unique = []
    for name in names:
        if name not in taken:
            name = next(numbered for i in count() if (numbered := f"{name}_{i}") not in taken)
            taken.add(name)
        unique.append(name)
    return unique


def _signature(func: RewardFunc) -> inspect.Signature | None:
    try:
        return inspect.signature(func)
    except (TypeError, ValueError):  # some builtins have none
        return None


def _named_parameters(func: RewardFunc) -> set[str] | None:
    """Arguments to pass by name; None = all there are."""
    signature = _signature(func)
    parameters = list(signature.parameters.values()) if signature else []
    by_position = [p.name for p in parameters if p.kind is p.POSITIONAL_ONLY and p.default is p.empty]
    by_keyword = any(p.kind is p.VAR_KEYWORD for p in parameters)
    if not by_keyword:
        by_position += [p.name for p in parameters if p.kind is p.VAR_POSITIONAL]
    if by_position:
        raise ValueError(
            f"reward function {_name(func)!r} takes {by_position} by position, but arguments are passed by name: "
            "declare e.g. (completions, **kwargs)."
        )
    return None if by_keyword or signature is None else set(signature.parameters)


def _own_copies(given: dict[str, Any], parameters: set[str] | None) -> dict[str, Any]:
    """The arguments of one function, as lists of its own: what it does to them reaches nobody else."""
    own = {name: value for name, value in given.items() if parameters is None or name in parameters}
    return {name: copy.deepcopy(value) if isinstance(value, list) else value for name, value in own.items()}


def _required_parameters(func: RewardFunc) -> list[str]:
    signature = _signature(func)
    return [
        p.name
        for p in (signature.parameters.values() if signature else ())
        if p.default is p.empty and p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)
    ]
