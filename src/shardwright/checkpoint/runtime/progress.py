"""How far a save or a load is: bytes counted by its threads, told to a callback, or shown on a terminal."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, TypeAlias, final

from shardwright import comm

if TYPE_CHECKING:
    from rich.progress import Progress as RichProgress

__all__ = ["Meter", "Progress", "ProgressCallback", "reporting"]

ProgressCallback: TypeAlias = Callable[[int, int], None]
"""What is called with the bytes done and those of the whole work, after every few megabytes."""

Progress: TypeAlias = Callable[[int], None]
"""What is called with the bytes that were just done, by any thread."""

_PATIENCE = 1.0  # seconds of work before a bar is worth showing


@final
class Meter:
    """Counts the bytes that threads have just done, and tells the sum. One call of `report` is made at a time.

    >>> meter = Meter(10, lambda done, total: print(f"{done} of {total}"))
    >>> meter(4)
    4 of 10
    >>> meter(6)
    10 of 10
    """

    def __init__(self, total: int, report: ProgressCallback | None = None) -> None:
        self.done, self.total = 0, total
        self._report = report
        self._lock = threading.Lock()

    def __call__(self, nbytes: int) -> None:
        with self._lock:
            self.done += nbytes
            if self._report is not None:
                self._report(self.done, self.total)


@contextmanager
def reporting(what: str, total: int, report: ProgressCallback | None, group: comm.Group) -> Iterator[Meter]:
    """A meter for this work: it tells `report`; without one, the first rank shows a bar if stderr is a terminal.

    >>> with reporting("saving", 8, None, comm.world()) as meter:
    ...     meter(8)
    """
    if report is not None or group.rank != 0 or not _is_terminal():
        yield Meter(total, report)
        return
    bar = _Bar(what)
    try:
        yield Meter(total, bar)
    finally:
        bar.close()


def _is_terminal() -> bool:
    stream = sys.stderr
    return stream is not None and not stream.closed and stream.isatty()


@final
class _Bar:
    """A bar that appears once the work has lasted a while, and is gone when it ends."""

    def __init__(self, what: str) -> None:
        self._what = what
        self._begin = time.monotonic()
        self._shown: RichProgress | None = None

    def __call__(self, done: int, total: int) -> None:
        if self._shown is None:
            if time.monotonic() - self._begin < _PATIENCE:
                return
            self._shown = _rich(self._what, total)
        self._shown.update(self._shown.task_ids[0], completed=done)

    def close(self) -> None:
        if self._shown is not None:
            self._shown.stop()


def _rich(what: str, total: int) -> RichProgress:
    from rich.console import Console  # only here: most work is over before anybody would look
    from rich.progress import BarColumn, DownloadColumn, TextColumn, TimeRemainingColumn, TransferSpeedColumn
    from rich.progress import Progress as Bar

    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TransferSpeedColumn())
    shown = Bar(*columns, TimeRemainingColumn(), console=Console(stderr=True), transient=True)
    shown.add_task(what, total=total)
    shown.start()
    return shown
