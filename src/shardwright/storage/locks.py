"""File locks that end with their process: a child that it forks does not keep them.

flock(2) locks belong to an open file, and a forked child has the same file open: if the parent is killed, the lock
would stay taken as long as the child lives. So children close the files of all locks as soon as they are forked.
"""

from __future__ import annotations

import os
import threading
from contextlib import suppress
from typing import final

from shardwright.storage.calls import Calls
from shardwright.storage.files import open_regular

__all__ = ["LockFile"]


@final
class LockFile:
    """A regular file, opened to be locked; `close` also releases the lock.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     file = LockFile(Calls(), f"{folder}/.lock", os.O_CREAT | os.O_RDWR)
    ...     file.lock()
    ...     file.close()
    """

    def __init__(self, calls: Calls, path: str, flags: int) -> None:
        self._calls = calls
        with _guard:  # a child forked between these two lines would not know of it
            self._fd, self.status = open_regular(calls, path, flags)
            _open.add(self)

    def lock(self, *, shared: bool = False) -> None:
        """Lock the file; raise BlockingIOError if another process holds it."""
        (self._calls.lock_shared if shared else self._calls.lock)(self._fd)

    def close(self) -> None:
        """Release the lock and close the file. In a child that was forked meanwhile, it is already closed."""
        with _guard:
            fd, self._fd = self._fd, -1
            _open.discard(self)
        if fd >= 0:
            with suppress(OSError):  # closing releases it as well
                self._calls.unlock(fd)
            with suppress(OSError):  # nothing was written through it
                self._calls.close(fd)

    def _close_in_child(self) -> None:
        fd, self._fd = self._fd, -1
        with suppress(OSError):  # not unlocked: the lock is the parent's
            os.close(fd)


_guard = threading.RLock()
_open: set[LockFile] = set()


def _in_a_child() -> None:
    for file in _open:
        file._close_in_child()
    _open.clear()
    _guard.release()


os.register_at_fork(before=_guard.acquire, after_in_parent=_guard.release, after_in_child=_in_a_child)
