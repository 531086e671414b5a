"""Background saves: one at a time, in order; no failure goes unreported.

A failed save is raised by its `wait`, or by the next save, or printed when the process exits. Exiting waits for the
saves that are still being written.
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

_EXIT_NOTICE_DELAY = 2.0  # seconds that exiting waits before it prints what it is waiting for


class SaveProgress(NamedTuple):
    """Bytes that this rank has written, and the total it has to write.

    >>> SaveProgress(5, 10).written
    5
    """

    written: int
    total: int


@final
class AsyncSave:
    """A save in the background: `wait` for it, or ask whether it is `done`.

    >>> import tempfile, torch
    >>> from shardwright.checkpoint import async_save, read
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     weights = torch.ones(2)
    ...     saving = async_save({"w": weights}, folder)
    ...     _ = weights.zero_()  # does not change what is saved
    ...     saving.wait()
    ...     read(folder), saving.done(), saving.progress
    ({'w': tensor([1., 1.])}, True, SaveProgress(written=8, total=8))
    """

    def __init__(self, path: str, meter: Meter) -> None:
        self.path = path
        self._meter = meter
        self._location = path
        self._ended = threading.Event()
        self._error: BaseException | None = None
        self._reported = False

    def __repr__(self) -> str:
        if not self.done():
            return f"AsyncSave({self.path!r}, {self._meter.done} of {self._meter.total} bytes written)"
        return f"AsyncSave({self.path!r}, {'failed' if self._error is not None else 'done'})"

    @property
    def progress(self) -> SaveProgress:
        """Bytes written so far on this rank, and its total."""
        return SaveProgress(self._meter.done, self._meter.total)

    def done(self) -> bool:
        """Return True once the save has ended, whether it succeeded or failed."""
        return self._ended.is_set()

    def wait(self, timeout: float | None = None) -> None:
        """Block until the checkpoint is committed; raise the error if the save failed.

        After `timeout` seconds raise `SaveTimeoutError`; the save continues.
        """
        if not self._ended.wait(timeout):
            raise SaveTimeoutError(
                f"the save to {self.path} has not ended after {timeout:g} s: {self._meter.done} of "
                f"{self._meter.total} bytes of this rank are written"
            )
        self._reported = True
        _forget_ended()
        if self._error is not None:
            raise self._error

    def _run(self, work: Callable[[], None], previous: AsyncSave | None) -> None:
        try:
            if previous is not None:
                previous._ended.wait()
            work()
        except BaseException as error:  # noqa: BLE001  re-raised by wait() or the next save
            self._error = error
        finally:
            self._ended.set()
            _forget_ended()


_pending: list[AsyncSave] = []  # running, or failed and not yet reported; in order
_lock = threading.Lock()


def start(path: str, location: str, meter: Meter, work: Callable[[], None]) -> AsyncSave:
    """Run `work` in a thread, after all saves started before. `location` is the key for `wait_for_saves_to`."""
    save = AsyncSave(path, meter)
    save._location = location
    with _lock:
        previous = _pending[-1] if _pending else None
        _pending.append(save)
    # A daemon thread, joined by `_finish`: Python would join a non-daemon thread silently.
    thread = threading.Thread(target=save._run, args=(work, previous), name=f"save to {path}", daemon=True)
    try:
        thread.start()
    except RuntimeError:  # cannot start a thread: run synchronously
        save._run(work, previous)
    return save


def wait_for_saves() -> None:
    """Block until no save is running; raise if one failed and its failure was not reported yet."""
    _await_all()
    raise_failures()


def raise_failures() -> None:
    """Raise if a save failed and its failure was not reported yet."""
    with _lock:
        failed = [save for save in _pending if save.done() and save._error is not None]
        for save in failed:
            save._reported = True
    _forget_ended()
    if failed:
        raise CheckpointError(
            "\n".join(f"a background save to {save.path} has failed: {save._error}" for save in failed)
            + "\nthis save was not started; call it again to continue without the failed one"
        ) from failed[0]._error


def wait_for_saves_to(location: str) -> None:
    """Block until no save of this process to this location is running; a failure is reported elsewhere."""
    with _lock:
        running = [save for save in _pending if save._location == location]
    for save in running:
        save._ended.wait()


def _await_all() -> None:
    with _lock:
        running = list(_pending)
    for save in running:
        save._ended.wait()


def _forget_ended() -> None:
    with _lock:
        _pending[:] = [save for save in _pending if not save.done() or (save._error is not None and not save._reported)]


def _finish() -> None:
    """At exit: wait for running saves and print failures that were not reported."""
    deadline = time.monotonic() + _EXIT_NOTICE_DELAY
    with _lock:
        saves = list(_pending)
    for save in saves:
        if not save._ended.wait(max(0.0, deadline - time.monotonic())):
            written, total = save.progress
            _print(f"finishing the save to {save.path}: {written} of {total} bytes are written")
            save._ended.wait()
        if save._error is not None and not save._reported:
            _print(f"the save to {save.path} has failed: {type(save._error).__name__}: {save._error}")


def _print(text: str) -> None:
    if sys.stderr is not None and not sys.stderr.closed:
        sys.stderr.write(f"shardwright: {text}\n")
        sys.stderr.flush()


def _after_fork() -> None:
    """In a forked child: the threads, and with them the saves, belong to the parent."""
    global _lock
    _lock = threading.Lock()
    _pending.clear()


os.register_at_fork(after_in_child=_after_fork)
atexit.register(_finish)
comm.on_forget(_await_all)  # ranks finish their collective saves before they leave the process group
