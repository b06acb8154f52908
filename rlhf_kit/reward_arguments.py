"""The arguments of a reward function: which it wants, and handing them over. Functions are known by their names."""

import copy
import inspect
from collections.abc import Callable
from functools import partial
from itertools import count
from typing import Any


def function_name(func: Callable[..., Any]) -> str:
    """Name of a function, of what a `partial` calls, or of an object's class."""
    while isinstance(func, partial):
        func = func.func
    name = getattr(func, "__name__", type(func).__name__)
    return "lambda" if name == "<lambda>" else name


def unique_names(names: list[str]) -> list[str]:
    """Names that occur several times get a number: f, g, f -> f_0, g, f_1."""
    taken = {name for name in names if names.count(name) == 1}
    unique = []
    for name in names:
        if name not in taken:
            name = next(numbered for i in count() if (numbered := f"{name}_{i}") not in taken)
            taken.add(name)
        unique.append(name)
    return unique


def _signature(func: Callable[..., Any]) -> inspect.Signature | None:
    try:
        return inspect.signature(func)
    except (TypeError, ValueError):  # some builtins have none
        return None


def named_parameters(func: Callable[..., Any]) -> set[str] | None:
    """Arguments to pass by name; None = all there are.

    Raises:
        ValueError: the function takes some by position.
    """
    signature = _signature(func)
    parameters = list(signature.parameters.values()) if signature else []
    by_position = [p.name for p in parameters if p.kind is p.POSITIONAL_ONLY and p.default is p.empty]
    by_keyword = any(p.kind is p.VAR_KEYWORD for p in parameters)
    if not by_keyword:
        by_position += [p.name for p in parameters if p.kind is p.VAR_POSITIONAL]
    if by_position:
        raise ValueError(
            f"reward function {function_name(func)!r} takes {by_position} by position, but arguments are passed by "
            "name: declare e.g. (completions, **kwargs)."
        )
    return None if by_keyword or signature is None else set(signature.parameters)


def own_copies(given: dict[str, Any], parameters: set[str] | None) -> dict[str, Any]:
    """The arguments of one function, as lists of its own: what it does to them reaches nobody else."""
    own = {name: value for name, value in given.items() if parameters is None or name in parameters}
    return {name: copy.deepcopy(value) if isinstance(value, list) else value for name, value in own.items()}


def required_parameters(func: Callable[..., Any]) -> list[str]:
    """Arguments without a default."""
    signature = _signature(func)
    return [
        p.name
        for p in (signature.parameters.values() if signature else ())
        if p.default is p.empty and p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)
    ]
