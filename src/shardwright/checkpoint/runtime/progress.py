"""Progress of a save or load: bytes counted by its threads, reported to a callback or shown on a terminal."""

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
"""Called with the bytes done and the total, after every few megabytes."""

Progress: TypeAlias = Callable[[int], None]
"""Called with the bytes just done, from any thread."""

_BAR_DELAY = 1.0  # seconds of work before a progress bar is shown


@final
class Meter:
    """Count the bytes that threads have done and report the sum. `report` is called by one thread at a time.

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
    """Yield a meter that calls `report`; without it, the first rank shows a progress bar if stderr is a terminal.

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
    """A progress bar that appears after a while and is removed when the work ends."""

    def __init__(self, what: str) -> None:
        self._what = what
        self._begin = time.monotonic()
        self._progress: RichProgress | None = None

    def __call__(self, done: int, total: int) -> None:
        if self._progress is None:
            if time.monotonic() - self._begin < _BAR_DELAY:
                return
            self._progress = _rich(self._what, total)
        self._progress.update(self._progress.task_ids[0], completed=done)

    def close(self) -> None:
        if self._progress is not None:
            self._progress.stop()


def _rich(what: str, total: int) -> RichProgress:
    from rich.console import Console  # imported late: most work is done before a bar is shown
    from rich.progress import BarColumn, DownloadColumn, TextColumn, TimeRemainingColumn, TransferSpeedColumn
    from rich.progress import Progress as Bar

    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TransferSpeedColumn())
    bar = Bar(*columns, TimeRemainingColumn(), console=Console(stderr=True), transient=True)
    bar.add_task(what, total=total)
    bar.start()
    return bar
