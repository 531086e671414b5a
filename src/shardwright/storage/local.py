"""Storage in a directory on a local or shared file system."""

from __future__ import annotations

import errno
import os
import stat
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import final

from shardwright.errors import MissingKeyError, StorageBusyError, StorageError
from shardwright.storage.address import folder_of
from shardwright.storage.base import Reader, Storage, Writer, check_key
from shardwright.storage.calls import Calls
from shardwright.storage.files import explained, is_folder, open_regular, status_of
from shardwright.storage.locks import LockFile

__all__ = ["LocalStorage"]

_BACKOFF = (0.001, 0.01, 0.05, None)  # seconds between attempts to take the lock
_MAX_BUFFERS = 1024  # IOV_MAX
_NEW = os.O_CREAT | os.O_EXCL | os.O_WRONLY | os.O_NOFOLLOW


@final
class LocalStorage(Storage):
    """One directory. Data is flushed before it counts; one rename puts the manifest in place.

    `path` is a path or a `file://` URL; a URL of another scheme is a `StorageError`. `locks=False` is for file systems
    without locks: then you must ensure that one job at a time saves there.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     storage = LocalStorage(folder)
    ...     storage.replace("manifest.json", b"{}")
    ...     storage.list_keys()
    ['manifest.json']
    """

    def __init__(self, path: str | os.PathLike[str], calls: Calls | None = None, *, locks: bool = True) -> None:
        self.path = folder_of(path)
        self._calls = calls or Calls()
        self._locks = locks

    def __repr__(self) -> str:
        return f"LocalStorage({self.path!r})"

    def prepare(self) -> None:
        """Create the directory and its parents, so that they survive a crash."""
        missing = []
        path = self.path
        while not is_folder(self._calls, path):
            missing.append(path)
            path = os.path.dirname(path)
        # The deepest existing one may be from a save that was killed before it could flush its parent.
        with self._storage_errors(path, "flush the parent of"):
            self._sync_folder(os.path.dirname(path), if_readable=True)
        for folder in reversed(missing):
            with self._storage_errors(folder, "make the folder"):
                try:
                    self._calls.mkdir(folder)
                except FileExistsError:
                    if not is_folder(self._calls, folder):  # else another job created it first
                        raise StorageError(f"{folder} exists and is not a directory") from None
                self._sync_folder(os.path.dirname(folder))

    def create(self, key: str) -> Writer:
        """Create a new file."""
        path = self._path(key)
        with self._storage_errors(path, "create"):
            fd = self._calls.open(path, _NEW)
        return _LocalWriter(self, fd, path)

    def open(self, key: str) -> Reader:
        """Open a file: a regular one, not a link, a pipe or a device."""
        path = self._path(key)
        with self._storage_errors(path, "open"):
            try:
                fd, status = open_regular(self._calls, path, os.O_RDONLY)
            except FileNotFoundError:
                raise MissingKeyError(f"{path} does not exist") from None
        return _LocalReader(self, fd, path, status.st_size)

    def open_file(self, name: str) -> Reader:
        """Open a file that another program wrote, of any name: a regular one, or a link to one, of this directory.

        >>> import tempfile
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     LocalStorage(folder).open_file("../secret")
        Traceback (most recent call last):
        shardwright.errors.StorageError: '../secret' is not the name of a file: it has a path separator or is empty
        """
        if not name or name in (".", "..") or set(name) & {"/", "\\", "\0"}:
            raise StorageError(f"{name[:200]!r} is not the name of a file: it has a path separator or is empty")
        path = os.path.join(self.path, name)
        with self._storage_errors(path, "open"):
            try:
                fd, status = open_regular(self._calls, path, os.O_RDONLY, follow=True)
            except FileNotFoundError:
                raise MissingKeyError(f"{path} does not exist") from None
        return _LocalReader(self, fd, path, status.st_size)

    def list_files(self) -> list[str]:
        """Return the names of everything in the directory, in order."""
        with self._storage_errors(self.path, "list"):
            try:
                return sorted(self._calls.listdir(self.path))
            except FileNotFoundError:
                return []

    def is_file(self) -> bool:
        """Return True if the path is that of a file, or of a link to one."""
        status = status_of(self._calls, self.path, follow=True)
        return status is not None and stat.S_ISREG(status.st_mode)

    def parent(self) -> LocalStorage:
        """Return the directory that holds the path."""
        return LocalStorage(os.path.dirname(self.path), self._calls, locks=self._locks)

    def replace(self, key: str, data: bytes) -> None:
        """Write a temporary file, flush it, rename it into place, and flush the directory."""
        path = self._path(key)
        temporary = f"{path}.{os.urandom(6).hex()}.tmp"
        with self._storage_errors(path, "replace"):
            fd = self._calls.open(temporary, _NEW)
            try:
                try:
                    self._write(fd, [memoryview(data)], 0)
                    self._calls.fsync(fd)
                except BaseException:
                    with suppress(OSError):  # the first error is the one to raise
                        self._calls.close(fd)
                    raise
                self._calls.close(fd)
                self._calls.rename(temporary, path)
            except BaseException:
                with suppress(OSError):
                    self._calls.unlink(temporary)
                raise
        with self._storage_errors(
            path, "flush the folder after replacing (the new file is in place, but may not outlive a crash)"
        ):
            self._sync_folder(self.path)

    def list_keys(self) -> list[str]:
        """Return the names of all files that a checkpoint could have created."""
        with self._storage_errors(self.path, "list"):
            try:
                names = self._calls.listdir(self.path)
            except FileNotFoundError:
                return []
        return sorted(name for name in names if _is_key(name))

    def delete(self, key: str) -> None:
        """Delete a file."""
        path = self._path(key)
        with self._storage_errors(path, "delete"), suppress(FileNotFoundError):
            self._calls.unlink(path)

    @contextmanager
    def lock(self) -> Iterator[None]:
        """Hold `.lock`; the kernel releases it when the process ends, however it ends."""
        if not self._locks:
            yield
            return
        path = os.path.join(self.path, ".lock")
        with self._storage_errors(path, "lock"):
            file = LockFile(self._calls, path, os.O_CREAT | os.O_RDWR)
        try:
            with self._storage_errors(path, "lock"):
                self._take(file)
                # Removing a checkpoint removes this file: then our lock excludes no one.
                status = status_of(self._calls, path)
                if status is None or not os.path.samestat(file.status, status):
                    raise StorageBusyError(f"{self.path}: another process is removing the checkpoint there")
            yield
        finally:
            file.close()

    def _take(self, file: LockFile) -> None:
        """Take the lock, with a few attempts: another process may hold it briefly to see whether it is free."""
        for delay in _BACKOFF:
            try:
                file.lock()
                return
            except BlockingIOError:
                if delay is None:
                    break
                time.sleep(delay)
        raise StorageBusyError(f"{self.path}: another process is saving a checkpoint there")

    def _path(self, key: str) -> str:
        return os.path.join(self.path, check_key(key))

    def _sync_folder(self, path: str, *, if_readable: bool = False) -> None:
        try:
            fd = self._calls.open(path, os.O_RDONLY | os.O_DIRECTORY)
        except PermissionError:
            if if_readable:
                return
            raise
        try:
            self._calls.fsync(fd)
        except OSError as error:
            if error.errno not in (errno.EINVAL, errno.ENOTSUP):  # a file system that does not flush directories
                raise
        finally:
            with suppress(OSError):  # nothing was written through it
                self._calls.close(fd)

    def _write(self, fd: int, buffers: Sequence[memoryview], offset: int) -> None:
        """Write all of the buffers, however many bytes the kernel takes at a time."""
        pending = _remaining(buffers, 0)
        while pending:
            written = self._calls.pwritev(fd, pending[:_MAX_BUFFERS], offset)
            if written == 0:
                raise OSError(errno.EIO, "the file takes no more bytes, without a reason")
            offset += written
            pending = _remaining(pending, written)

    @contextmanager
    def _storage_errors(self, path: str, action: str) -> Iterator[None]:
        """Convert system errors to `StorageError`s that say what was being done to which path."""
        try:
            yield
        except OSError as error:
            if isinstance(error, StorageError):
                raise
            raise StorageError(f"cannot {action} {path}: {explained(error)}") from error


@final
class _LocalWriter(Writer):
    def __init__(self, storage: LocalStorage, fd: int, path: str) -> None:
        self._storage, self._fd, self._path = storage, fd, path
        self._ended = False

    def write(self, buffers: Sequence[memoryview], offset: int) -> None:
        if self._fd < 0:
            raise StorageError(f"cannot write {self._path}: its writer is closed")
        nbytes = sum(buffer.nbytes for buffer in buffers)
        with self._storage._storage_errors(self._path, "write"):
            self._storage._write(self._fd, buffers, offset)
            self._storage._calls.write_back(self._fd, offset, nbytes)

    def finish(self) -> None:
        if self._fd < 0:
            raise StorageError(f"cannot finish {self._path}: its writer is closed")
        calls, fd = self._storage._calls, self._fd
        with self._storage._storage_errors(self._path, "flush"):
            # A failed fsync is never repeated: the kernel has dropped the pages and would report success.
            calls.fsync(fd)
            self._fd = -1
            calls.close(fd)
            self._storage._sync_folder(self._storage.path)
        self._ended = True

    def abort(self) -> None:
        if self._ended:
            return
        self._ended = True
        fd, self._fd = self._fd, -1
        if fd >= 0:
            with suppress(OSError):
                self._storage._calls.close(fd)
        with suppress(OSError):
            self._storage._calls.unlink(self._path)


@final
class _LocalReader(Reader):
    def __init__(self, storage: LocalStorage, fd: int, path: str, size: int) -> None:
        self._storage, self._fd, self._path, self._size = storage, fd, path, size

    @property
    def size(self) -> int:
        return self._size

    def read(self, buffers: Sequence[memoryview], offset: int) -> None:
        if self._fd < 0:
            raise StorageError(f"cannot read {self._path}: its reader is closed")
        pending = _remaining(buffers, 0)
        end = offset + sum(buffer.nbytes for buffer in pending)
        if not 0 <= offset <= end <= self._size:
            raise StorageError(f"{self._path} has {self._size} bytes, but bytes {offset} to {end} were requested")
        calls = self._storage._calls
        with self._storage._storage_errors(self._path, "read"):
            while pending:
                got = calls.preadv(self._fd, pending[:_MAX_BUFFERS], offset)
                if got == 0:
                    raise StorageError(
                        f"{self._path} had {self._size} bytes when it was opened and ends at {offset} now: "
                        "it was truncated"
                    )
                offset += got
                pending = _remaining(pending, got)
            now = calls.fstat(self._fd).st_size
        if now != self._size:
            raise StorageError(
                f"{self._path} had {self._size} bytes when it was opened and has {now} now: it is being changed"
            )

    def close(self) -> None:
        if self._fd >= 0:
            fd, self._fd = self._fd, -1
            with suppress(OSError):  # nothing was written through it
                self._storage._calls.close(fd)


def _remaining(buffers: Sequence[memoryview], done: int) -> list[memoryview]:
    """Return the buffers without their first `done` bytes and without empty ones at the beginning."""
    for number, buffer in enumerate(buffers):
        if done < buffer.nbytes:
            return [buffer.cast("B")[done:] if done else buffer, *buffers[number + 1 :]]
        done -= buffer.nbytes
    return []


def _is_key(name: str) -> bool:
    try:
        return bool(check_key(name))
    except StorageError:
        return False
