"""Reward functions: calling them with TRL's signature, and weighting what they say into one score.

    def reward(prompts, completions, completion_ids, **columns) -> list[float | list[float] | None]

`prompts` and `completions` are what a reader would see: no padding, no special tokens, no prompt in the completion; a
chat prompt gets its completion as [{"role": "assistant", "content": text}]. `completion_ids` are the sampled ids, end
token included. `columns` are the dataset's other columns, row-aligned. There are also `prompt_ids`, `trainer_state`,
and TRL's `log_extra(column, values)` and `log_metric(name, value)`. A function without `**kwargs` gets only what it
names. Functions may be async: they then run concurrently.

For each completion a function returns one number, or one number per token of `completion_ids`, or None for "not
applicable". Numbers per token stay at their tokens; the score of such a completion is their sum.
"""

import asyncio
import inspect
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from threading import Thread
from typing import Any

import torch
from torch import Tensor, nn

from rlhf_kit.reward_arguments import function_name, named_parameters, own_copies, required_parameters, unique_names
from rlhf_kit.reward_output import Samples, checked_output, refuse_huge, refuse_silence

RewardFunc = Callable[..., Any]

CHAT_HINT = " Prompts are chats, so each completion is a list of messages: its text is completion[0]['content']."
ALWAYS_GIVEN = ("prompts", "completions", "prompt_ids", "completion_ids", "trainer_state", "log_extra", "log_metric")


@dataclass(frozen=True)
class Rewards:
    """What was said of B completions; T = tokens of the longest.

    Attributes:
        scores: (B,) float32, weighted sum over the functions, numbers per token included.
        token_rewards: (B, T) float32, weighted sum of the numbers given per token, 0 elsewhere; None = there are none.
        by_function: name -> (B,) float32, unweighted, summed over tokens, NaN = not applicable.
        columns: column of the completions table -> B values, from `log_extra`.
        metrics: name -> mean of what `log_metric` was given.
    """

    scores: Tensor
    token_rewards: Tensor | None = None
    by_function: dict[str, Tensor] = field(default_factory=dict)
    columns: dict[str, list[Any]] = field(default_factory=dict)
    metrics: dict[str, float] = field(default_factory=dict)


class Notes:
    """What the functions log besides their rewards, during one call.

    Args:
        batch_size: B.
    """

    def __init__(self, batch_size: int):
        self._batch_size = batch_size
        self.columns: dict[str, list[Any]] = {}
        self._values: dict[str, list[float]] = {}

    def functions(self, name: str) -> dict[str, Callable[..., None]]:
        """`log_extra` and `log_metric` for one reward function."""

        def log_extra(column: str, values: list[Any]) -> None:
            if len(values) != self._batch_size:
                raise ValueError(
                    f"log_extra({column!r}, ...) got {len(values)} values for {self._batch_size} completions."
                )
            self.columns[f"{name}/{column}" if column in self.columns else column] = list(values)

        def log_metric(metric: str, value: float) -> None:
            self._values.setdefault(metric, []).append(float(value))

        return {"log_extra": log_extra, "log_metric": log_metric}

    def metrics(self) -> dict[str, float]:
        """Means of the values of each name."""
        return {name: sum(values) / len(values) for name, values in self._values.items()}


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
                    f"of floats, got {type(func).__name__}."
                )
        if weights is not None and len(weights) != len(self._funcs):
            raise ValueError(
                f"reward_weights has {len(weights)} entries for {len(self._funcs)} reward functions: give one each."
            )
        weights = [1.0] * len(self._funcs) if weights is None else list(weights)
        if not all(map(math.isfinite, weights)):
            raise ValueError(f"reward_weights must be finite, got {weights}.")
        self._weights = torch.tensor(weights, dtype=torch.float32)
        self.names = unique_names([function_name(func) for func in self._funcs])
        self._parameters = [named_parameters(func) for func in self._funcs]
        # What passes through the model comes first: no process may miss such a pass because a function failed in it.
        self._order = sorted(range(len(self._funcs)), key=lambda i: not hasattr(self._funcs[i], "fingerprint"))
        self._loop: asyncio.AbstractEventLoop | None = None
        if column_names is not None:
            self.check_arguments(column_names)

    def __call__(
        self,
        *,
        prompts: list[Any],
        completions: list[Any],
        prompt_ids: list[list[int]],
        completion_ids: list[list[int]],
        columns: dict[str, list[Any]],
        trainer_state: Any = None,
    ) -> Rewards:
        """Score completions.

        Args:
            prompts: B prompts as in the dataset.
            completions: B texts, or B one-message lists for chats.
            prompt_ids, completion_ids: B lists of ids.
            columns: other dataset columns, each with B values.
            trainer_state: passed on to the functions.

        Returns:
            `Rewards`.

        Raises:
            TypeError: a function returned something else than one number, one number per token or None for each
                completion.
            ValueError: a wrong number of rewards, NaN or infinity, or a completion on which every function said None;
                naming the function and the completion.
            Exception: whatever a function raises, with a note that says which function it was.
        """
        notes = Notes(len(prompts))
        given = {
            **columns,
            "prompts": prompts,
            "completions": completions,
            "prompt_ids": prompt_ids,
            "completion_ids": completion_ids,
            "trainer_state": trainer_state,
        }
        outputs = self._call_all(given, notes)
        samples = Samples(prompts, completions, [len(ids) for ids in completion_ids])
        checked = [checked_output(name, out, samples) for name, out in zip(self.names, outputs, strict=True)]
        by_function = dict(zip(self.names, (output.totals for output in checked), strict=True))
        table = torch.stack(list(by_function.values()), dim=-1)  # (B, number of functions)
        refuse_silence(table, self.names, samples)
        scores = (table.nan_to_num(0.0) * self._weights).sum(-1)  # (B,)
        refuse_huge(scores, self.names, samples)
        parts = zip(self._weights.tolist(), (output.per_token for output in checked), strict=True)
        per_token = [weight * part for weight, part in parts if part is not None]  # (B, T) each
        return Rewards(
            scores=scores,
            token_rewards=sum(per_token[1:], per_token[0]) if per_token else None,
            by_function=by_function,
            columns=notes.columns,
            metrics=notes.metrics(),
        )

    def _call_all(self, given: dict[str, Any], notes: "Notes") -> list[Any]:
        outputs: list[Any] = [None] * len(self._funcs)
        for i in self._order:
            name, logging = self.names[i], notes.functions(self.names[i])
            try:
                outputs[i] = self._funcs[i](**own_copies(given | logging, self._parameters[i]))
            except Exception as error:
                _close(outputs)
                chat = "" if isinstance(given["completions"][0], str) else CHAT_HINT
                count = len(given["completions"])
                error.add_note(f"raised by reward function {name!r} on {count} completions.{chat}")
                raise
        if any(inspect.isawaitable(output) for output in outputs):
            outputs = asyncio.run_coroutine_threadsafe(_gather(self.names, outputs), self._event_loop()).result()
        return outputs

    def fingerprints(self) -> dict[str, str]:
        """Digests of the weights of the reward models, by name."""
        pairs = zip(self.names, self._funcs, strict=True)
        return {name: func.fingerprint() for name, func in pairs if hasattr(func, "fingerprint")}

    def model_bytes(self) -> int:
        """Bytes of the weights that the reward models hold themselves."""
        return sum(func.nbytes() for func in self._funcs if hasattr(func, "fingerprint"))

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
            missing = [p for p in required_parameters(func) if p not in known]
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
