"""A folder of checkpoints, one for each step: finding them, holding one while it is read, removing one.

A step is there from the moment its manifest is, so removing begins with the manifest: what a crash leaves half removed
is no checkpoint, as what it leaves half saved is none. Nobody's files but ours are removed.

Two locks are kept in a step's folder. Who saves there holds `.lock`. Who reads holds `.readers`, with others; who
removes holds both alone. They are flock(2) locks: the kernel drops them with the process, however it ends. They hold
among the processes of a host, and among hosts where the file system carries them (NFS version 4, and 3 with lockd).
"""

from __future__ import annotations

import errno
import fcntl
import os
import re
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import final

from shardwright.checkpoint.format.manifest import KEY, Manifest
from shardwright.checkpoint.read.current import read_manifest
from shardwright.checkpoint.save import is_of_a_save, may_be_removed
from shardwright.errors import NotACheckpointError, StorageBusyError, StorageError
from shardwright.storage import Calls, LocalStorage

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
        self.root = os.path.abspath(os.fspath(root))
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
                with suppress(FileNotFoundError, NotADirectoryError):
                    status = os.stat(os.path.join(self.path(step), KEY))
                    found[step] = f"{status.st_ino}.{status.st_mtime_ns}.{status.st_size}"
            # All that was listed may be gone by now, and a newer one there: nothing is only believed when it stays so.
            if found or self._folders() == folders:
                return found

    def abandoned(self) -> list[int]:
        """The steps without a manifest in which nobody is at work: left by a save or a removal that was cut short."""
        found = []
        for step in self._folders():
            path = self.path(step)
            # A second look, after the lock: who held it at the first may have put the manifest there before letting go.
            if os.path.isdir(path) and not _has_manifest(path) and not _is_locked(path) and not _has_manifest(path):
                found.append(step)
        return found

    def unfinished(self) -> list[int]:
        """Those of the abandoned that hold data: a save of theirs did not end. Data is written under the lock only."""
        begun = {step for step in self._folders() if any(map(is_of_a_save, self.storage(step).list_keys()))}
        return [step for step in self.abandoned() if step in begun]

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
            os.close(os.open(path, os.O_CREAT | os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC, 0o666))

    @contextmanager
    def reading(self, step: int) -> Iterator[str]:
        """Holds a step: while it lasts, nobody removes it. Gives its folder."""
        path = self.path(step)
        fd = self._hold(path)
        try:
            if not _has_manifest(path):
                raise _not_there(path)
            yield path
        finally:
            if fd is not None:
                with suppress(OSError):  # by name: children that were forked meanwhile have the file open, too
                    fcntl.flock(fd, fcntl.LOCK_UN)
                os.close(fd)

    def remove(self, step: int, *, if_abandoned: bool = False) -> None:
        """Removes a step; a `StorageBusyError` where somebody saves there or reads it. A second time is no mistake.

        With `if_abandoned`, one that has a manifest after all stays.
        """
        storage = self.storage(step)
        if not os.path.isdir(storage.path) or os.path.islink(storage.path):
            return
        try:
            with storage.lock(), self._alone(storage.path):
                if if_abandoned and _has_manifest(storage.path):
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
                os.rmdir(storage.path)
        except OSError as error:
            if isinstance(error, StorageError):
                raise
            if error.errno not in (errno.ENOTEMPTY, errno.EEXIST, errno.ENOENT):  # somebody's own files stay
                raise StorageError(f"cannot remove {storage.path}: {error.strerror}") from error

    def _folders(self) -> list[int]:
        """The steps that have a folder, whatever is in it."""
        try:
            names = self._calls.listdir(self.root)
        except FileNotFoundError:
            return []
        except OSError as error:
            raise StorageError(f"cannot list {self.root}: {error.strerror}") from error
        steps = (int(found[1]) for name in names if (found := _NAME.fullmatch(name)))
        return sorted(step for step in steps if os.path.basename(self.path(step)) in names)

    def _hold(self, path: str) -> int | None:
        """A shared lock on a folder's `.readers`; None where we may neither find it nor make it."""
        readers = os.path.join(path, _READERS)
        while True:
            try:
                fd = _open_readers(readers)
            except FileNotFoundError:
                raise _not_there(path) from None
            except OSError as error:
                if error.errno in _READ_ONLY:
                    return None
                raise StorageError(f"cannot open {readers}: {error.strerror}") from error
            try:
                fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
                if _is_at(fd, readers):
                    return fd
            except BlockingIOError:
                os.close(fd)
                raise NotACheckpointError(f"{path} is being removed") from None
            except OSError as error:
                os.close(fd)
                raise StorageError(f"cannot lock {readers}: {error.strerror}") from error
            os.close(fd)  # it was removed between the two calls; another may be there now

    @contextmanager
    def _alone(self, path: str) -> Iterator[None]:
        """An exclusive lock on a folder's `.readers`."""
        readers = os.path.join(path, _READERS)
        fd = self._calls.open(readers, os.O_CREAT | os.O_RDWR | os.O_NOFOLLOW)
        try:
            try:
                self._calls.lock(fd)
            except BlockingIOError:
                raise StorageBusyError(f"{path} is being read") from None
            yield
        finally:
            with suppress(OSError):
                self._calls.unlock(fd)
            self._calls.close(fd)

    def _sync(self, path: str) -> None:
        fd = self._calls.open(path, os.O_RDONLY | os.O_DIRECTORY)
        try:
            self._calls.fsync(fd)
        finally:
            self._calls.close(fd)


def _has_manifest(path: str) -> bool:
    return os.path.exists(os.path.join(path, KEY))


def _open_readers(path: str) -> int:
    flags = os.O_NOFOLLOW | os.O_CLOEXEC
    try:
        return os.open(path, os.O_RDONLY | flags)
    except FileNotFoundError:
        return os.open(path, os.O_RDONLY | os.O_CREAT | flags, 0o666)


def _is_at(fd: int, path: str) -> bool:
    with suppress(FileNotFoundError):
        there, here = os.stat(path, follow_symlinks=False), os.fstat(fd)
        return (there.st_dev, there.st_ino) == (here.st_dev, here.st_ino)
    return False


def _is_locked(path: str) -> bool:
    """Whether somebody saves to a folder, or removes it."""
    try:
        fd = os.open(os.path.join(path, _LOCK), os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError:
        return False
    try:
        fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
        fcntl.flock(fd, fcntl.LOCK_UN)
    except OSError:
        return True
    finally:
        os.close(fd)
    return False


def _not_there(path: str) -> NotACheckpointError:
    return NotACheckpointError(f"{path} holds no checkpoint: there is no {KEY}")
