"""A folder of checkpoints, one for each step: finding them, holding one while it is read, removing one.

A step is there from the moment its manifest is, so removing begins with the manifest: what a crash leaves half removed
is no checkpoint, as what it leaves half saved is none. Nobody's files but ours are removed.

Two locks are kept in a step's folder. Who saves there holds `.lock`. Who reads holds `.readers`, with others; who
removes holds both alone. They are flock(2) locks: the kernel drops them with the process, however it ends. They hold
among the processes of a host, and among hosts where the file system carries them (NFS version 4, and 3 with lockd).

Nothing is judged by a call that failed. A manifest is missing only if the file system says so (ENOENT); any other error
is raised as a `StorageError`, and then nothing is removed.
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

__all__ = ["Steps"]

_READERS = ".readers"
_LOCK = ".lock"
_NAME = re.compile(r"step-([0-9]{8,})")
_READ_ONLY = (errno.EACCES, errno.EPERM, errno.EROFS)


@final
class Steps:
    """The steps under a folder, which need not exist yet.

    >>> Steps("runs/7").path(1000)[-20:]
    'runs/7/step-00001000'
    """

    def __init__(self, root: str | os.PathLike[str], calls: Calls | None = None) -> None:
        self.root = folder_of(root)
        self._calls = calls or Calls()

    def path(self, step: int) -> str:
        """The folder of a step."""
        return os.path.join(self.root, f"step-{step:08d}")

    def storage(self, step: int) -> LocalStorage:
        """The folder of a step, as a place of one checkpoint."""
        return LocalStorage(self.path(step), self._calls)

    def committed(self) -> dict[int, str]:
        """The steps that have a manifest, in order, each with a mark that changes when it is saved anew."""
        while True:
            folders = self._folders()
            found = {}
            for step in folders:
                if mark := self._mark(step):
                    found[step] = mark
            # All that was listed may be gone by now, and a newer one there: nothing is only believed when it stays so.
            if found or self._folders() == folders:
                return found

    def without_manifest(self) -> list[int]:
        """Return the steps that have a folder and no manifest: being saved now, or left by what was cut short."""
        return [step for step in self._folders() if is_folder(self._calls, self.path(step)) and not self._mark(step)]

    def is_abandoned(self, step: int) -> bool:
        """Return whether a step has no manifest and nobody saves or removes it; raise if that cannot be known."""
        # A second look, after the lock: who held it at the first may have put the manifest there before letting go.
        return not self._mark(step) and not self._is_locked(step) and not self._mark(step)

    def has_data(self, step: int) -> bool:
        """Return whether a step holds files of a save. They are written under the lock only."""
        return any(map(is_save_file, self.storage(step).list_keys()))

    def manifest(self, step: int) -> Manifest:
        """The manifest of a step, all of whose data files are there. Their contents are not looked at."""
        storage = self.storage(step)
        manifest = read_manifest(storage)
        missing = sorted(manifest.names - set(storage.list_keys()))
        if missing:
            raise NotACheckpointError(f"{storage!r} lacks {len(missing)} of its data files, such as {missing[0]}")
        return manifest

    def announce(self, step: int) -> None:
        """Makes the file that readers lock, so that those can who may not write here."""
        path = os.path.join(self.path(step), _READERS)
        with suppress(OSError):  # then readers make it
            LockFile(self._calls, path, os.O_CREAT | os.O_RDWR).close()

    @contextmanager
    def reading(self, step: int) -> Iterator[str]:
        """Holds a step: while it lasts, nobody removes it. Gives its folder."""
        path = self.path(step)
        file = self._hold(path)
        try:
            if not self._mark(step):
                raise _not_there(path)
            yield path
        finally:
            if file is not None:
                file.close()

    def remove(self, step: int, *, if_mark: str | None = None) -> None:
        """Remove a step; raise `StorageBusyError` if somebody saves there or reads it. A second time is no mistake.

        With `if_mark`, the mark that the step had when it was judged, one that was saved meanwhile stays; the mark of a
        step without a manifest is "".
        """
        storage = self.storage(step)
        status = status_of(self._calls, storage.path)
        if status is None or not stat.S_ISDIR(status.st_mode):
            return
        try:
            with storage.lock(), self._alone(storage.path):
                if if_mark not in (None, self._mark(step)):
                    return
                storage.delete(KEY)
                # Only when this is safe may a data file go: else a crash could leave a manifest without them.
                self._sync(storage.path)
                for key in storage.list_keys():
                    if may_be_removed(storage, key):
                        storage.delete(key)
                for name in (_READERS, _LOCK):
                    with suppress(FileNotFoundError):
                        self._calls.unlink(os.path.join(storage.path, name))
                self._calls.rmdir(storage.path)
        except OSError as error:
            if isinstance(error, StorageError):
                raise
            if error.errno not in (errno.ENOTEMPTY, errno.EEXIST, errno.ENOENT):  # somebody's own files stay
                raise StorageError(f"cannot remove {storage.path}: {explained(error)}") from error

    def _folders(self) -> list[int]:
        """The steps that have a folder, whatever is in it."""
        try:
            names = self._calls.listdir(self.root)
        except FileNotFoundError:
            return []
        except OSError as error:
            raise StorageError(f"cannot list {self.root}: {explained(error)}") from error
        steps = (int(found[1]) for name in names if (found := _NAME.fullmatch(name)))
        return sorted(step for step in steps if os.path.basename(self.path(step)) in names)

    def _mark(self, step: int) -> str:
        """Return what changes when a step is saved anew, "" if it has no manifest; raise if that cannot be known."""
        status = status_of(self._calls, os.path.join(self.path(step), KEY))
        return "" if status is None else f"{status.st_ino}.{status.st_mtime_ns}.{status.st_size}"

    def _hold(self, path: str) -> LockFile | None:
        """Return a folder's `.readers`, locked with others; None where we may neither find it nor make it."""
        readers = os.path.join(path, _READERS)
        while True:
            try:
                file = self._open_readers(readers)
            except FileNotFoundError:
                raise _not_there(path) from None
            except OSError as error:
                if isinstance(error, StorageError):
                    raise
                if error.errno in _READ_ONLY:
                    return None
                raise StorageError(f"cannot open {readers}: {explained(error)}") from error
            try:
                file.lock(shared=True)
                there = status_of(self._calls, readers)
                if there is not None and os.path.samestat(file.status, there):
                    return file
            except BlockingIOError:
                file.close()
                raise NotACheckpointError(f"{path} is being removed") from None
            except OSError as error:
                file.close()
                if isinstance(error, StorageError):
                    raise
                raise StorageError(f"cannot lock {readers}: {explained(error)}") from error
            file.close()  # it was removed between the two calls; another may be there now

    def _open_readers(self, path: str) -> LockFile:
        try:
            return LockFile(self._calls, path, os.O_RDONLY)
        except FileNotFoundError:
            return LockFile(self._calls, path, os.O_RDONLY | os.O_CREAT)

    @contextmanager
    def _alone(self, path: str) -> Iterator[None]:
        """Hold an exclusive lock on a folder's `.readers`."""
        file = LockFile(self._calls, os.path.join(path, _READERS), os.O_CREAT | os.O_RDWR)
        try:
            try:
                file.lock()
            except BlockingIOError:
                raise StorageBusyError(f"{path} is being read") from None
            yield
        finally:
            file.close()

    def _is_locked(self, step: int) -> bool:
        """Return whether somebody saves to a step, or removes it; raise `StorageError` if that cannot be known."""
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
        except OSError:  # another process holds it; or nobody can say, and then it counts as held
            return True
        finally:
            file.close()
        return False

    def _sync(self, path: str) -> None:
        fd = self._calls.open(path, os.O_RDONLY | os.O_DIRECTORY)
        try:
            self._calls.fsync(fd)
        finally:
            self._calls.close(fd)


def _not_there(path: str) -> NotACheckpointError:
    return NotACheckpointError(f"{path} holds no checkpoint: there is no {KEY}")
