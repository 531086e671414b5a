"""The directories of a run's steps: list them, lock one while it is read, remove one.

A step exists once its manifest does, so removal deletes the manifest first: what a crash leaves half removed is not a
checkpoint, just as what it leaves half saved is not. Only files that a save created are removed.

Each step directory has two locks. A save holds `.lock`. Readers hold a shared lock on `.readers`; removal takes both
exclusively. They are flock(2) locks, which the kernel releases when the process ends. They work among the processes of
a host, and among hosts where the file system supports it (NFS version 4, and version 3 with lockd).

A failed call decides nothing. A manifest is missing only if the file system says so (ENOENT); any other error is raised
as a `StorageError`, and nothing is removed.
"""

from __future__ import annotations

import errno
import os
import re
import stat
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import final

from shardwright.checkpoint.format.manifest import KEY, Manifest
from shardwright.checkpoint.reading.current import read_manifest
from shardwright.checkpoint.writing.leftovers import is_save_file, may_be_removed
from shardwright.errors import NotACheckpointError, StorageBusyError, StorageError
from shardwright.storage import Calls, LocalStorage
from shardwright.storage.address import folder_of
from shardwright.storage.files import explained, is_folder, status_of
from shardwright.storage.locks import LockFile

__all__ = ["Steps", "remove_checkpoint", "version_of"]

_READERS = ".readers"
_LOCK = ".lock"
_NAME = re.compile(r"step-([0-9]{8,})")
_READ_ONLY = (errno.EACCES, errno.EPERM, errno.EROFS)


@final
class Steps:
    """The steps under a root directory, which may not exist yet.

    >>> Steps("runs/7").path(1000)[-20:]
    'runs/7/step-00001000'
    """

    def __init__(self, root: str | os.PathLike[str], calls: Calls | None = None) -> None:
        self.root = folder_of(root)
        self._calls = calls or Calls()

    def path(self, step: int) -> str:
        """Return the directory of a step."""
        return os.path.join(self.root, f"step-{step:08d}")

    def storage(self, step: int) -> LocalStorage:
        """Return the directory of a step as a storage."""
        return LocalStorage(self.path(step), self._calls)

    def committed(self) -> dict[int, str]:
        """Return the steps that have a manifest, in order, each with a version that changes when it is replaced."""
        while True:
            directories = self._directories()
            versions = {}
            for step in directories:
                if version := self._version(step):
                    versions[step] = version
            # List again: an empty result may be a race with a concurrent replacement.
            if versions or self._directories() == directories:
                return versions

    def without_manifest(self) -> list[int]:
        """Return the steps that have a directory but no manifest: being saved now, or left over from a crash."""
        return [
            step for step in self._directories() if is_folder(self._calls, self.path(step)) and not self._version(step)
        ]

    def is_abandoned(self, step: int) -> bool:
        """Return True if a step has no manifest and is not being saved or removed; raise if that is unknown."""
        # Look again after the lock: its last holder may have put the manifest in place before releasing it.
        return not self._version(step) and not self._is_locked(step) and not self._version(step)

    def has_data(self, step: int) -> bool:
        """Return True if a step has files of a save. They are written only under the lock."""
        return any(map(is_save_file, self.storage(step).list_keys()))

    def manifest(self, step: int) -> Manifest:
        """Read the manifest of a step, and check that all its data files exist. Their contents are not read."""
        storage = self.storage(step)
        manifest = read_manifest(storage)
        missing = sorted(manifest.names - set(storage.list_keys()))
        if missing:
            raise NotACheckpointError(f"{storage!r} is missing {len(missing)} of its data files, such as {missing[0]}")
        return manifest

    def size(self, step: int) -> int:
        """Return the bytes of all files of a step; files that are removed meanwhile do not count."""
        try:
            names = self._calls.listdir(self.path(step))
        except OSError:
            return 0
        statuses = (status_of(self._calls, os.path.join(self.path(step), name)) for name in names)
        return sum(status.st_size for status in statuses if status is not None and stat.S_ISREG(status.st_mode))

    def leftovers(self, step: int) -> dict[str, int]:
        """Return the files of failed saves in the directory of a valid step, each with its size in bytes."""
        storage, manifest = self.storage(step), self.manifest(step)
        names = [key for key in storage.list_keys() if key not in manifest.names and may_be_removed(storage, key)]
        statuses = {name: status_of(self._calls, os.path.join(storage.path, name)) for name in names}
        return {name: status.st_size for name, status in statuses.items() if status is not None}

    def remove_leftovers(self, step: int) -> dict[str, int]:
        """Remove what `leftovers` returns, and return it. Raise `StorageBusyError` while the step is being saved."""
        storage = self.storage(step)
        if not self.leftovers(step):
            return {}
        with storage.lock():
            files = self.leftovers(step)  # again, as a save may have ended before the lock was taken
            for name in files:
                storage.delete(name)
        return files

    def announce(self, step: int) -> None:
        """Create the file that readers lock, for readers without write permission."""
        path = os.path.join(self.path(step), _READERS)
        with suppress(OSError):  # then readers create it
            LockFile(self._calls, path, os.O_CREAT | os.O_RDWR).close()

    @contextmanager
    def reading(self, step: int) -> Iterator[str]:
        """Keep a step from being removed while the context lasts; yield its directory."""
        path = self.path(step)
        file = self._lock_shared(path)
        try:
            if not self._version(step):
                raise _no_checkpoint(path)
            yield path
        finally:
            if file is not None:
                file.close()

    def remove(self, step: int, *, if_version: str | None = None) -> None:
        """Remove a step. Idempotent. Raise `StorageBusyError` while it is being saved or read.

        With `if_version`, remove it only if its manifest still has this version; "" means that it has no manifest.
        """
        remove_checkpoint(self.storage(step), self._calls, if_version)

    def _directories(self) -> list[int]:
        """Return the steps that have a directory, whatever it contains."""
        try:
            names = self._calls.listdir(self.root)
        except FileNotFoundError:
            return []
        except OSError as error:
            raise StorageError(f"cannot list {self.root}: {explained(error)}") from error
        steps = (int(matched[1]) for name in names if (matched := _NAME.fullmatch(name)))
        return sorted(step for step in steps if os.path.basename(self.path(step)) in names)

    def _version(self, step: int) -> str:
        return version_of(self._calls, self.path(step))

    def _lock_shared(self, path: str) -> LockFile | None:
        """Return `.readers` with a shared lock; None if it neither exists nor can be created."""
        readers = os.path.join(path, _READERS)
        while True:
            try:
                file = self._open_readers(readers)
            except FileNotFoundError:
                raise _no_checkpoint(path) from None
            except OSError as error:
                if isinstance(error, StorageError):
                    raise
                if error.errno in _READ_ONLY:
                    return None
                raise StorageError(f"cannot open {readers}: {explained(error)}") from error
            try:
                file.lock(shared=True)
                status = status_of(self._calls, readers)
                if status is not None and os.path.samestat(file.status, status):
                    return file
            except BlockingIOError:
                file.close()
                raise NotACheckpointError(f"{path} is being removed") from None
            except OSError as error:
                file.close()
                if isinstance(error, StorageError):
                    raise
                raise StorageError(f"cannot lock {readers}: {explained(error)}") from error
            file.close()  # it was removed between the two calls; there may be a new one

    def _open_readers(self, path: str) -> LockFile:
        try:
            return LockFile(self._calls, path, os.O_RDONLY)
        except FileNotFoundError:
            return LockFile(self._calls, path, os.O_RDONLY | os.O_CREAT)

    def _is_locked(self, step: int) -> bool:
        """Return True if a step is being saved or removed; raise `StorageError` if that cannot be determined."""
        path = os.path.join(self.path(step), _LOCK)
        try:
            file = LockFile(self._calls, path, os.O_RDONLY)
        except FileNotFoundError:
            return False
        except OSError as error:
            if isinstance(error, StorageError):
                raise
            raise StorageError(f"cannot open {path}: {explained(error)}") from error
        try:
            file.lock(shared=True)
        except OSError:  # another process holds it, or it cannot be determined, which counts as held
            return True
        finally:
            file.close()
        return False


def version_of(calls: Calls, folder: str) -> str:
    """Return a version that changes when a checkpoint is replaced, "" if there is none; raise if that is unknown."""
    status = status_of(calls, os.path.join(folder, KEY))
    return "" if status is None else f"{status.st_ino}.{status.st_mtime_ns}.{status.st_size}"


def remove_checkpoint(storage: LocalStorage, calls: Calls, if_version: str | None = None) -> None:
    """Remove a checkpoint. Idempotent. Raise `StorageBusyError` while it is being saved or read.

    With `if_version`, remove it only if its manifest still has this version; "" means that it has no manifest.
    """
    status = status_of(calls, storage.path)
    if status is None or not stat.S_ISDIR(status.st_mode):
        return
    try:
        with storage.lock(), _exclusive(calls, storage.path):
            if if_version not in (None, version_of(calls, storage.path)):
                return
            storage.delete(KEY)
            # Data files may be removed only after this: else a crash could leave a manifest without them.
            _sync(calls, storage.path)
            for key in storage.list_keys():
                if may_be_removed(storage, key):
                    storage.delete(key)
            for name in (_READERS, _LOCK):
                with suppress(FileNotFoundError):
                    calls.unlink(os.path.join(storage.path, name))
            calls.rmdir(storage.path)
    except OSError as error:
        if isinstance(error, StorageError):
            raise
        if error.errno not in (errno.ENOTEMPTY, errno.EEXIST, errno.ENOENT):  # files that are not ours stay
            raise StorageError(f"cannot remove {storage.path}: {explained(error)}") from error


@contextmanager
def _exclusive(calls: Calls, path: str) -> Iterator[None]:
    """Hold an exclusive lock on `.readers`."""
    file = LockFile(calls, os.path.join(path, _READERS), os.O_CREAT | os.O_RDWR)
    try:
        try:
            file.lock()
        except BlockingIOError:
            raise StorageBusyError(f"{path} is being read") from None
        yield
    finally:
        file.close()


def _sync(calls: Calls, path: str) -> None:
    fd = calls.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        calls.fsync(fd)
    finally:
        calls.close(fd)


def _no_checkpoint(path: str) -> NotACheckpointError:
    return NotACheckpointError(f"{path} holds no checkpoint: there is no {KEY}")
