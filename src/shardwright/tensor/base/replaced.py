"""Replacements of torch's functions: marked, so that installing them twice does nothing even if others wrapped them."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any

__all__ = ["is_replaced", "replacing"]

_MARK = "_replaced_by_shardwright"  # functools.wraps copies it to wrappers of our function


def replacing(original: Any) -> Callable[[Any], Any]:
    """Return a decorator that makes a function look like the one it replaces and marks it as our replacement.

    >>> is_replaced(replacing(len)(lambda values: 0)), is_replaced(len)
    (True, False)
    """

    def mark(function: Any) -> Any:
        made = wraps(original)(function)
        setattr(made, _MARK, True)
        return made

    return mark


def is_replaced(function: Any) -> bool:
    """Return whether a function of torch was replaced by this package, even if another package has wrapped it since."""
    return getattr(function, _MARK, False)
