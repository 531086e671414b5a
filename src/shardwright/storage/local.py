"""A folder on a local or shared file system."""

from __future__ import annotations

import errno
import os
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

_PATIENCE = (0.001, 0.01, 0.05, None)  # seconds between asking for the lock, and then no more
_MOST_BUFFERS = 1024  # IOV_MAX
_NEW = os.O_CREAT | os.O_EXCL | os.O_WRONLY | os.O_NOFOLLOW


@final
class LocalStorage(Storage):
    """One folder. Data is flushed before it counts; one rename puts the manifest in place.

    `path` is a path or a `file://` URL; a URL of another scheme is a `StorageError`. `locks=False` is for file systems
    without locks: then see to it yourself that one job at a time saves there.

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
        """Makes the folder and its parents; they are there after a crash, too."""
        missing = []
        path = self.path
        while not is_folder(self._calls, path):
            missing.append(path)
            path = os.path.dirname(path)
        # The lowest one that is there may come from a save that was killed before it could flush its parent.
        with self._told(path, "flush the parent of"):
            self._sync_folder(os.path.dirname(path), if_readable=True)
        for folder in reversed(missing):
            with self._told(folder, "make the folder"):
                try:
                    self._calls.mkdir(folder)
                except FileExistsError:
                    if not is_folder(self._calls, folder):  # a folder: another job was first
                        raise StorageError(f"{folder} is there, and is not a folder") from None
                self._sync_folder(os.path.dirname(folder))

    def create(self, key: str) -> Writer:
        """A new file."""
        path = self._path(key)
        with self._told(path, "create"):
            fd = self._calls.open(path, _NEW)
        return _LocalWriter(self, fd, path)

    def open(self, key: str) -> Reader:
        """A file: a regular one, not a link, a pipe or a device."""
        path = self._path(key)
        with self._told(path, "open"):
            try:
                fd, status = open_regular(self._calls, path, os.O_RDONLY)
            except FileNotFoundError:
                raise MissingKeyError(f"{path} does not exist") from None
        return _LocalReader(self, fd, path, status.st_size)

    def replace(self, key: str, data: bytes) -> None:
        """Writes a temporary file, flushes it, and renames it into place; then the folder is flushed."""
        path = self._path(key)
        temporary = f"{path}.{os.urandom(6).hex()}.tmp"
        with self._told(path, "replace"):
            fd = self._calls.open(temporary, _NEW)
            try:
                try:
                    self._write(fd, [memoryview(data)], 0)
                    self._calls.fsync(fd)
                except BaseException:
                    with suppress(OSError):  # the first error is the one to tell
                        self._calls.close(fd)
                    raise
                self._calls.close(fd)
                self._calls.rename(temporary, path)
            except BaseException:
                with suppress(OSError):
                    self._calls.unlink(temporary)
                raise
        with self._told(
            path, "flush the folder after replacing (the new file is in place, but may not outlive a crash)"
        ):
            self._sync_folder(self.path)

    def list_keys(self) -> list[str]:
        """The names of all files that a checkpoint could have made."""
        with self._told(self.path, "list"):
            try:
                names = self._calls.listdir(self.path)
            except FileNotFoundError:
                return []
        return sorted(name for name in names if _is_key(name))

    def delete(self, key: str) -> None:
        """Removes a file."""
        path = self._path(key)
        with self._told(path, "delete"), suppress(FileNotFoundError):
            self._calls.unlink(path)

    @contextmanager
    def lock(self) -> Iterator[None]:
        """Holds `.lock`; the kernel lets go of it when the process ends, however it ends."""
        if not self._locks:
            yield
            return
        path = os.path.join(self.path, ".lock")
        with self._told(path, "lock"):
            file = LockFile(self._calls, path, os.O_CREAT | os.O_RDWR)
        try:
            with self._told(path, "lock"):
                self._take(file)
                # Who removes a checkpoint removes this file: then what we hold excludes nobody.
                there = status_of(self._calls, path)
                if there is None or not os.path.samestat(file.status, there):
                    raise StorageBusyError(f"{self.path}: another process is removing the checkpoint there")
            yield
        finally:
            file.close()

    def _take(self, file: LockFile) -> None:
        """The lock. It is asked for a few times: somebody may hold it for a moment, to see whether it is free."""
        for patience in _PATIENCE:
            try:
                file.lock()
                return
            except BlockingIOError:
                if patience is None:
                    break
                time.sleep(patience)
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
            if error.errno not in (errno.EINVAL, errno.ENOTSUP):  # a file system that flushes no folders
                raise
        finally:
            with suppress(OSError):  # nothing was written through it
                self._calls.close(fd)

    def _write(self, fd: int, buffers: Sequence[memoryview], offset: int) -> None:
        """All of the buffers, whatever the kernel takes at a time."""
        pending = _rest(buffers, 0)
        while pending:
            written = self._calls.pwritev(fd, pending[:_MOST_BUFFERS], offset)
            if written == 0:
                raise OSError(errno.EIO, "the file takes no more bytes, and no reason is given")
            offset += written
            pending = _rest(pending, written)

    @contextmanager
    def _told(self, path: str, doing: str) -> Iterator[None]:
        """Turns the system's errors into ours, which say what was being done to what."""
        try:
            yield
        except OSError as error:
            if isinstance(error, StorageError):
                raise
            raise StorageError(f"cannot {doing} {path}: {explained(error)}") from error


@final
class _LocalWriter(Writer):
    def __init__(self, storage: LocalStorage, fd: int, path: str) -> None:
        self._storage, self._fd, self._path = storage, fd, path
        self._ended = False

    def write(self, buffers: Sequence[memoryview], offset: int) -> None:
        if self._fd < 0:
            raise StorageError(f"cannot write {self._path}: its writer has ended")
        nbytes = sum(buffer.nbytes for buffer in buffers)
        with self._storage._told(self._path, "write"):
            self._storage._write(self._fd, buffers, offset)
            self._storage._calls.write_back(self._fd, offset, nbytes)

    def finish(self) -> None:
        if self._fd < 0:
            raise StorageError(f"cannot finish {self._path}: its writer has ended")
        calls, fd = self._storage._calls, self._fd
        with self._storage._told(self._path, "flush"):
            # A failed fsync is never tried again: the kernel has dropped the pages and would say it is well.
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
        pending = _rest(buffers, 0)
        end = offset + sum(buffer.nbytes for buffer in pending)
        if not 0 <= offset <= end <= self._size:
            raise StorageError(f"{self._path} has {self._size} bytes, and bytes {offset} to {end} are wanted")
        calls = self._storage._calls
        with self._storage._told(self._path, "read"):
            while pending:
                got = calls.preadv(self._fd, pending[:_MOST_BUFFERS], offset)
                if got == 0:
                    raise StorageError(
                        f"{self._path} had {self._size} bytes when it was opened and ends at {offset} now: "
                        "it has been cut off"
                    )
                offset += got
                pending = _rest(pending, got)
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


def _rest(buffers: Sequence[memoryview], done: int) -> list[memoryview]:
    """What is left of the buffers after so many bytes: without those that are empty, at the beginning at least."""
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
