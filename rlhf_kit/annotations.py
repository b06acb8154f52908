"""Whether a value fits a type annotation, and how to say the annotation in an error message."""

import types
import typing
from typing import Any, Literal


def matches(value: object, hint: Any) -> bool:
    """Whether a value fits an annotation: int passes as float, bool passes only as bool."""
    origin, args = typing.get_origin(hint), typing.get_args(hint)
    if origin is types.UnionType or origin is typing.Union:
        return any(matches(value, arg) for arg in args)
    if origin is Literal:
        return value in args
    if origin is list:
        return isinstance(value, list) and all(matches(item, args[0]) for item in value)
    if hint is float:
        return isinstance(value, int | float) and not isinstance(value, bool)
    if hint is int:
        return isinstance(value, int) and not isinstance(value, bool)
    return isinstance(value, hint)


def describe(hint: Any) -> str:
    """An annotation in words: 'int or None', "'reward' or 'loss'", 'a list of str'."""
    origin, args = typing.get_origin(hint), typing.get_args(hint)
    if origin is types.UnionType or origin is typing.Union:
        return " or ".join("None" if arg is type(None) else describe(arg) for arg in args)
    if origin is Literal:
        return " or ".join(map(repr, args))
    if origin is list:
        return f"a list of {describe(args[0])}"
    return str(hint.__name__)
