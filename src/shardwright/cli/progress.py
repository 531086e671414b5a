"""A progress bar on stderr for work that takes a while; nothing if stderr is not a terminal."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TypeAlias

from shardwright import comm
from shardwright.checkpoint.runtime.progress import reporting

__all__ = ["Advance", "progress_bar", "progress_callback"]

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


@contextmanager
def progress_callback(what: str) -> Iterator[Callable[[int, int], None]]:
    """Yield a function that takes the bytes done and the total, as `shardwright.checkpoint` calls it.

    >>> with progress_callback("verifying") as report:
    ...     report(4, 10)
    """
    with reporting(what, 0, None, comm.world()) as meter:

        def report(done: int, total: int) -> None:
            meter.total = total
            meter(done - meter.done)

        yield report
