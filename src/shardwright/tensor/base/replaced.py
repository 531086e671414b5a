"""Functions that replace torch's: made once, also where another package has replaced the same function before."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any

__all__ = ["is_replaced", "replacing"]

_MARK = "_replaced_by_shardwright"  # functools.wraps copies it to what others put around our function


def replacing(original: Any) -> Callable[[Any], Any]:
    """Return a decorator that makes a function look like the one it replaces, and marks it as ours.

    >>> is_replaced(replacing(len)(lambda values: 0)), is_replaced(len)
    (True, False)
    """

    def mark(function: Any) -> Any:
        made = wraps(original)(function)
        setattr(made, _MARK, True)
        return made

    return mark


def is_replaced(function: Any) -> bool:
    """Return whether a function of torch was replaced by this package already. Other packages may wrap it as well."""
    return getattr(function, _MARK, False)
