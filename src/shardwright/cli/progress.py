"""A progress bar on stderr for work that takes a while; nothing if stderr is not a terminal."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TypeAlias

from shardwright import comm
from shardwright.checkpoint.runtime.progress import reporting

__all__ = ["Advance", "callback", "progress_bar"]

Advance: TypeAlias = Callable[[int], None]
"""Called with the bytes just done."""


@contextmanager
def progress_bar(what: str, total: int) -> Iterator[Advance]:
    """Yield a function to call with the bytes just done.

    >>> with progress_bar("reading", 8) as advance:
    ...     advance(8)
    """
    with reporting(what, total, None, comm.world()) as meter:
        yield meter


def callback(advance: Advance) -> Callable[[int, int], None]:
    """Return a function that takes the bytes done and the total, as those of `shardwright.checkpoint` are called.

    >>> report = callback(print)
    >>> report(4, 10), report(10, 10)
    4
    6
    (None, None)
    """
    before = 0

    def report(done: int, _total: int) -> None:
        nonlocal before
        advance(done - before)
        before = done

    return report
