"""Saves that go on behind their caller: one at a time, in order; none of them ends unnoticed.

A save that failed is told at the next use: by `wait`, by the next save to anywhere, or at the end of the process, which
waits for those that are still being written.
"""

from __future__ import annotations

import atexit
import os
import sys
import threading
import time
from collections.abc import Callable
from typing import NamedTuple, final

from shardwright import comm
from shardwright.checkpoint.runtime.progress import Meter
from shardwright.errors import CheckpointError, SaveTimeoutError

__all__ = ["AsyncSave", "SaveProgress", "raise_failures", "start", "wait_for_saves", "wait_for_saves_to"]

_PATIENCE = 2.0  # seconds at the end of a process until it says what it waits for


class SaveProgress(NamedTuple):
    """Bytes of this rank that are written, and all that it writes.

    >>> SaveProgress(5, 10).written
    5
    """

    written: int
    total: int


@final
class AsyncSave:
    """A save in the background: `wait` for it, or ask whether it is `done`.

    >>> import tempfile, torch
    >>> from shardwright.checkpoint import async_save, load
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     weights = torch.ones(2)
    ...     saving = async_save({"w": weights}, folder)
    ...     _ = weights.zero_()  # what is saved is as it was
    ...     saving.wait()
    ...     load(folder), saving.done(), saving.progress
    ({'w': tensor([1., 1.])}, True, SaveProgress(written=8, total=8))
    """

    def __init__(self, path: str, meter: Meter) -> None:
        self.path = path
        self._meter = meter
        self._place = path
        self._ended = threading.Event()
        self._error: BaseException | None = None
        self._told = False

    def __repr__(self) -> str:
        if not self.done():
            return f"AsyncSave({self.path!r}, {self._meter.done} of {self._meter.total} bytes written)"
        return f"AsyncSave({self.path!r}, {'failed' if self._error is not None else 'done'})"

    @property
    def progress(self) -> SaveProgress:
        """How much of this rank's part is written."""
        return SaveProgress(self._meter.done, self._meter.total)

    def done(self) -> bool:
        """Whether it has ended, well or not."""
        return self._ended.is_set()

    def wait(self, timeout: float | None = None) -> None:
        """Returns when the checkpoint is complete and safe, or raises why it could not be made.

        After `timeout` seconds it raises a `SaveTimeoutError`; the save goes on.
        """
        if not self._ended.wait(timeout):
            raise SaveTimeoutError(
                f"the save to {self.path} has not ended after {timeout:g} s: {self._meter.done} of "
                f"{self._meter.total} bytes of this rank are written"
            )
        self._told = True
        _forget_ended()
        if self._error is not None:
            raise self._error

    def _run(self, work: Callable[[], None], before: AsyncSave | None) -> None:
        try:
            if before is not None:
                before._ended.wait()
            work()
        except BaseException as error:  # noqa: BLE001  it is raised where somebody hears it
            self._error = error
        finally:
            self._ended.set()
            _forget_ended()


_unsettled: list[AsyncSave] = []  # running, or failed and not told yet; in order
_lock = threading.Lock()


def start(path: str, place: str, meter: Meter, work: Callable[[], None]) -> AsyncSave:
    """Does the work in a thread, behind the saves that were started before. `place` is for `wait_for_saves_to`."""
    save = AsyncSave(path, meter)
    save._place = place
    with _lock:
        before = _unsettled[-1] if _unsettled else None
        _unsettled.append(save)
    # A daemon, and waited for by `_finish`: a thread that Python joins by itself is joined without a word.
    thread = threading.Thread(target=save._run, args=(work, before), name=f"save to {path}", daemon=True)
    try:
        thread.start()
    except RuntimeError:  # no more threads are to be had: then it is done here
        save._run(work, before)
    return save


def wait_for_saves() -> None:
    """Returns when no save is running; raises if one failed and nobody was told."""
    _await_all()
    raise_failures()


def raise_failures() -> None:
    """Raises if a save has failed and nobody was told."""
    with _lock:
        failed = [save for save in _unsettled if save.done() and save._error is not None]
        for save in failed:
            save._told = True
    _forget_ended()
    if failed:
        raise CheckpointError(
            "\n".join(f"a save in the background, to {save.path}, has failed: {save._error}" for save in failed)
            + "\nthis save was not begun; begin it again to go on without that one"
        ) from failed[0]._error


def wait_for_saves_to(place: str) -> None:
    """Returns when no save of this process to this place is running; one that failed is told elsewhere."""
    with _lock:
        running = [save for save in _unsettled if save._place == place]
    for save in running:
        save._ended.wait()


def _await_all() -> None:
    with _lock:
        running = list(_unsettled)
    for save in running:
        save._ended.wait()


def _forget_ended() -> None:
    with _lock:
        _unsettled[:] = [save for save in _unsettled if not save.done() or (save._error is not None and not save._told)]


def _finish() -> None:
    """At the end of the process: waits for what is running, and says what failed."""
    deadline = time.monotonic() + _PATIENCE
    with _lock:
        saves = list(_unsettled)
    for save in saves:
        if not save._ended.wait(max(0.0, deadline - time.monotonic())):
            written, total = save.progress
            _say(f"finishing the save to {save.path}: {written} of {total} bytes are written")
            save._ended.wait()
        if save._error is not None and not save._told:
            _say(f"the save to {save.path} has failed: {type(save._error).__name__}: {save._error}")


def _say(text: str) -> None:
    if sys.stderr is not None and not sys.stderr.closed:
        sys.stderr.write(f"shardwright: {text}\n")
        sys.stderr.flush()


def _in_a_child() -> None:
    """After a fork: the threads are the parent's, and so are the saves."""
    global _lock
    _lock = threading.Lock()
    _unsettled.clear()


os.register_at_fork(after_in_child=_in_a_child)
atexit.register(_finish)
comm.on_forget(_await_all)  # ranks that leave their world finish what they do together first
