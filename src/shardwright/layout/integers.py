"""Validate integer arguments."""

from __future__ import annotations

from collections.abc import Iterable
from operator import index

from shardwright.errors import ArgumentTypeError

__all__ = ["integer", "integers"]

_PLAIN = {int}


def integer(value: object, what: str) -> int:
    """Return `value` as an int; raise an error that mentions `what` if it is not one."""
    # bool is a subclass of int, but `Shard(True)` is a mistake.
    if not isinstance(value, bool):
        try:
            return index(value)  # type: ignore[arg-type]  # raises TypeError without __index__
        except TypeError:
            pass
    raise ArgumentTypeError(f"{what} must be an int, got {type(value).__name__}: {value!r}")


def integers(values: object, what: str) -> tuple[int, ...]:
    """Return `values` as a tuple of ints; raise an error that mentions `what` if they are not."""
    if isinstance(values, (list, tuple)) and set(map(type, values)) <= _PLAIN:  # fast path: a fifth of the time
        return tuple(values)
    if not isinstance(values, Iterable) or isinstance(values, (str, bytes)):
        raise ArgumentTypeError(f"{what} must be a sequence of ints, got {type(values).__name__}: {values!r}")
    return tuple(integer(value, what) for value in values)
