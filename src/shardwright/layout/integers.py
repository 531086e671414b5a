"""Checking that what a caller gave is a tuple of plain integers."""

from __future__ import annotations

from collections.abc import Iterable
from operator import index

from shardwright.errors import ArgumentTypeError

__all__ = ["integer", "integers"]

_PLAIN = {int}


def integer(value: object, what: str) -> int:
    """`value` as an int, or an error that names `what` it should have been."""
    # bool is an int to Python, but `Shard(True)` is a mistake.
    if not isinstance(value, bool):
        try:
            return index(value)  # type: ignore[arg-type]  # a value without __index__ is what is being refused
        except TypeError:
            pass
    raise ArgumentTypeError(f"{what} {value!r} is a {type(value).__name__}: an integer is needed")


def integers(values: object, what: str) -> tuple[int, ...]:
    """`values` as a tuple of ints, or an error that names `what` they should have been."""
    if isinstance(values, (list, tuple)) and set(map(type, values)) <= _PLAIN:  # the usual case, in a fifth of the time
        return tuple(values)
    if not isinstance(values, Iterable) or isinstance(values, (str, bytes)):
        raise ArgumentTypeError(f"{what} {values!r} is a {type(values).__name__}: a sequence of integers is needed")
    return tuple(integer(value, what) for value in values)
