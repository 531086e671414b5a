"""Every system call on a checkpoint's files, in one place, so that tests can record them or make them fail."""

from __future__ import annotations

import ctypes
import fcntl
import os
from collections.abc import Callable, Sequence
from contextlib import suppress

__all__ = ["Calls"]

_FULL_FSYNC: int | None = getattr(fcntl, "F_FULLFSYNC", None)  # macOS: its fsync leaves the data in the drive's cache


class Calls:
    """The system calls. Tests pass a subclass to `LocalStorage` that records them, or fails one of them.

    >>> "manifest.json" in Calls().listdir(".")
    False
    """

    def open(self, path: str, flags: int, mode: int = 0o666) -> int:
        """open(2), not inherited by children."""
        return os.open(path, flags | os.O_CLOEXEC, mode)

    def close(self, fd: int) -> None:
        """close(2). If a signal interrupts it, the descriptor is closed all the same."""
        with suppress(InterruptedError):
            os.close(fd)

    def pwritev(self, fd: int, buffers: Sequence[memoryview], offset: int) -> int:
        """pwritev(2), or one pwrite(2) if there is none; return the number of bytes written."""
        if hasattr(os, "pwritev"):
            return os.pwritev(fd, buffers, offset)
        return os.pwrite(fd, buffers[0], offset)

    def preadv(self, fd: int, buffers: Sequence[memoryview], offset: int) -> int:
        """preadv(2), or one pread(2) if there is none; return the number of bytes read."""
        if hasattr(os, "preadv"):
            return os.preadv(fd, buffers, offset)
        target = buffers[0].cast("B")
        data = os.pread(fd, target.nbytes, offset)
        target[: len(data)] = data
        return len(data)

    def write_back(self, fd: int, offset: int, nbytes: int) -> None:
        """Ask the kernel to start writing a range back to the disk, if supported. Correctness does not depend on it."""
        if _sync_file_range is not None:
            _sync_file_range(fd, offset, nbytes, 2)  # SYNC_FILE_RANGE_WRITE

    def fsync(self, fd: int) -> None:
        """fsync(2), down to the disk itself."""
        if _FULL_FSYNC is not None:
            fcntl.fcntl(fd, _FULL_FSYNC)
        else:
            os.fsync(fd)

    def fstat(self, fd: int) -> os.stat_result:
        """fstat(2)."""
        return os.fstat(fd)

    def stat(self, path: str, *, follow: bool = False) -> os.stat_result:
        """lstat(2), or stat(2) to follow links."""
        return os.stat(path, follow_symlinks=follow)

    def rename(self, source: str, target: str) -> None:
        """rename(2)."""
        os.rename(source, target)

    def unlink(self, path: str) -> None:
        """unlink(2)."""
        os.unlink(path)

    def mkdir(self, path: str) -> None:
        """mkdir(2)."""
        os.mkdir(path)

    def rmdir(self, path: str) -> None:
        """rmdir(2)."""
        os.rmdir(path)

    def listdir(self, path: str) -> list[str]:
        """Return the names in a directory."""
        return os.listdir(path)

    def lock(self, fd: int) -> None:
        """flock(2), exclusive; raise BlockingIOError if another process holds it."""
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)

    def lock_shared(self, fd: int) -> None:
        """flock(2), shared; raise BlockingIOError if another process holds it exclusively."""
        fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)

    def unlock(self, fd: int) -> None:
        """Release an flock(2) lock."""
        fcntl.flock(fd, fcntl.LOCK_UN)


def _find_sync_file_range() -> Callable[[int, int, int, int], int] | None:
    function = getattr(ctypes.CDLL(None), "sync_file_range", None)
    if function is None:
        return None
    function.argtypes = (ctypes.c_int, ctypes.c_int64, ctypes.c_int64, ctypes.c_uint)
    return function  # type: ignore[no-any-return]  # a foreign function


_sync_file_range = _find_sync_file_range()
