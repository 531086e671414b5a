"""Run work on contiguous parts in a few threads; the first error stops all of them and is raised."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import final

import numpy as np

from shardwright.checkpoint.format.tensor_table import Integers

__all__ = ["Stop", "in_threads", "split"]


@final
class Stop:
    """True once another thread has failed, so that this one can stop."""

    def __init__(self) -> None:
        self.errors: list[BaseException] = []

    def __bool__(self) -> bool:
        return bool(self.errors)


def in_threads(
    work: Callable[[int, int, Stop], None], parts: Sequence[tuple[int, int]], threads: int | None = None
) -> None:
    """Call `work(first, last, stop)` for every part: the first part in this thread, the others in one thread each.

    With fewer `threads`, a thread that is done takes the next part, so a slow core does not delay the rest.

    >>> done = []
    >>> in_threads(lambda first, last, stop: done.append(last - first), [(0, 3), (3, 5), (5, 9)], threads=2)
    >>> sorted(done)
    [2, 3, 4]
    """
    stop = Stop()
    remaining = iter(list(parts))  # iterating over a list is thread-safe
    own_part = next(remaining, None)

    def take(part: tuple[int, int] | None) -> None:
        try:
            while part is not None and not stop:
                work(*part, stop)
                part = next(remaining, None)
        except BaseException as error:  # noqa: BLE001  raised again below
            stop.errors.append(error)

    helpers = []
    for _ in range(min(len(parts), threads or len(parts)) - 1):
        thread = threading.Thread(target=lambda: take(next(remaining, None)), daemon=True)
        try:
            thread.start()
        except RuntimeError:  # cannot start a thread, or the interpreter is shutting down
            break
        helpers.append(thread)
    take(own_part)
    for thread in helpers:
        while thread.is_alive():
            try:
                thread.join()
            except BaseException as error:  # noqa: BLE001  an interrupt: raised below, when no thread uses the memory
                stop.errors.append(error)
    if stop.errors:
        raise stop.errors[0]


def split(nbytes: Integers, parts: int, least: int) -> list[tuple[int, int]]:
    """Divide items in order into `parts` of about equal size in bytes; into fewer if a part would be below `least`.

    >>> split(np.array([4, 4, 4, 4]), parts=2, least=8)
    [(0, 2), (2, 4)]
    """
    if not len(nbytes):
        return []
    ends = np.cumsum(nbytes)
    total = int(ends[-1])
    count = max(1, min(parts, total // least))
    boundaries = [
        0,
        *(np.searchsorted(ends, [total * part // count for part in range(1, count)]) + 1).tolist(),
        len(nbytes),
    ]
    return [(a, b) for a, b in pairwise(boundaries) if a < b]
