"""Inspect files without guessing: a file that cannot be inspected never counts as absent."""

from __future__ import annotations

import errno
import os
import stat
from contextlib import suppress

from shardwright.errors import StorageError
from shardwright.storage.calls import Calls

__all__ = ["explained", "is_folder", "open_regular", "status_of"]

_SAFELY = os.O_NOFOLLOW | os.O_NONBLOCK  # opening a pipe must not wait for its other end


def status_of(calls: Calls, path: str, *, follow: bool = False) -> os.stat_result | None:
    """Return the status of a path, or None if the file system says that it does not exist.

    Only ENOENT (and ENOTDIR: a parent is a file) means that. Every other failure is raised: a server that does not
    respond does not show that a file is gone.

    >>> status_of(Calls(), "/nothing/here") is None
    True
    """
    try:
        return calls.stat(path, follow=follow)
    except (FileNotFoundError, NotADirectoryError):
        return None
    except OSError as error:
        raise StorageError(f"cannot inspect {path}: {explained(error)}") from error


def is_folder(calls: Calls, path: str) -> bool:
    """Return True if a path is a directory, or a link to one; raise `StorageError` if that cannot be determined.

    >>> is_folder(Calls(), "/")
    True
    """
    status = status_of(calls, path, follow=True)
    return status is not None and stat.S_ISDIR(status.st_mode)


def open_regular(calls: Calls, path: str, flags: int, *, follow: bool = False) -> tuple[int, os.stat_result]:
    """Open a file and return its descriptor and status; reject links, pipes and devices, without waiting for them.

    With `follow`, a link to a regular file is accepted.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     os.mkfifo(f"{folder}/pipe")
    ...     open_regular(Calls(), f"{folder}/pipe", os.O_RDONLY)
    Traceback (most recent call last):
    shardwright.errors.StorageError: /.../pipe is not a regular file: a checkpoint holds regular files only; remove it
    """
    try:
        fd = calls.open(path, flags | (os.O_NONBLOCK if follow else _SAFELY))
    except OSError as error:
        if error.errno in (errno.ELOOP, errno.EMLINK):  # EMLINK: FreeBSD
            raise _irregular(path, "is a symbolic link") from None
        if error.errno in (errno.ENXIO, errno.EISDIR):  # ENXIO: a pipe without a reader, or a socket
            raise _irregular(path, "is not a regular file") from None
        raise
    try:
        status = calls.fstat(fd)
        if not stat.S_ISREG(status.st_mode):
            raise _irregular(path, "is not a regular file")
    except BaseException:
        with suppress(OSError):
            calls.close(fd)
        raise
    return fd, status


def _irregular(path: str, kind: str) -> StorageError:
    return StorageError(f"{path} {kind}: a checkpoint holds regular files only; remove it")


def explained(error: OSError) -> str:
    """Return what a system error means for a checkpoint, and how to fix it if known.

    >>> explained(OSError(errno.EROFS, "Read-only file system"))
    'the file system is read-only'
    """
    match error.errno:
        case errno.ENOSPC:
            return "no space is left on the device: free some, or save elsewhere"
        case errno.EDQUOT:
            return "the disk quota is used up: free some of it, or save elsewhere"
        case errno.EROFS:
            return "the file system is read-only"
        case errno.EACCES | errno.EPERM:
            return f"permission denied to user {os.geteuid()} ({error.strerror})"
        case errno.EEXIST:
            return "it exists already"
        case errno.ENOTDIR:
            return "a part of the path is a file, not a folder"
        case errno.ENOSYS | errno.EOPNOTSUPP | errno.ENOLCK:
            return (
                f"this file system cannot do that ({error.strerror}); where it has no locks (Lustre: mount option "
                "flock), use LocalStorage(path, locks=False), and let one job at a time save there"
            )
        case errno.EMFILE:
            return "this process has too many files open: raise its limit (ulimit -n)"
    return error.strerror or str(error)
