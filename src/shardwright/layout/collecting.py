"""No looking for garbage while tens of thousands of values are made, none of which is any."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager

__all__ = ["not_collecting"]


@contextmanager
def not_collecting() -> Iterator[None]:
    """Has Python's garbage collector wait: it would look at every value made so far, again and again.

    >>> with not_collecting():
    ...     gc.isenabled()
    False
    """
    collecting = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if collecting:
            gc.enable()
