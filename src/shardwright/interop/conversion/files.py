"""New files of a conversion: written once, in order, and flushed; and the folder that is renamed into place."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from types import TracebackType
from typing import final

from torch import Tensor

from shardwright.checkpoint.runtime.address_space import memory_at
from shardwright.errors import StorageError

__all__ = ["NewFile", "commit", "discard", "storage_errors", "sync_folder", "temporary_name"]


@final
class NewFile:
    """A file that did not exist, written in order; it is flushed to the disk when it is closed."""

    def __init__(self, path: str) -> None:
        self.path = path
        with storage_errors(path):
            self.file = open(path, "xb", buffering=0)  # noqa: SIM115  closed by __exit__

    def write(self, data: bytes | memoryview) -> None:
        """Write all of it."""
        view = memoryview(data)
        with storage_errors(self.path):
            while view.nbytes:
                view = view[self.file.write(view) :]

    def write_tensor(self, flat: Tensor) -> None:
        """Write the elements of a flat host tensor."""
        if flat.nbytes:
            contiguous = flat.contiguous()
            self.write(memory_at(contiguous.data_ptr(), contiguous.nbytes))

    def __enter__(self) -> NewFile:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        try:
            if kind is None:
                with storage_errors(self.path):
                    os.fsync(self.file.fileno())
        finally:
            self.file.close()


@contextmanager
def storage_errors(path: str) -> Iterator[None]:
    """Raise errors of the system as `StorageError`s that name the path."""
    try:
        yield
    except StorageError:
        raise
    except OSError as error:
        raise StorageError(f"{path} could not be written: {error.strerror or error}") from error


def temporary_name(path: str) -> str:
    """Return the name under which a result is written before it is renamed to `path`."""
    folder, name = os.path.split(os.path.abspath(path))
    return os.path.join(folder, f".{name}.{os.urandom(6).hex()}.tmp")


def commit(temporary: str, path: str) -> None:
    """Rename a finished result into place, and flush its folder."""
    with storage_errors(path):
        if os.path.isdir(temporary):
            sync_folder(temporary)
        if os.path.lexists(path):
            raise StorageError(f"{path} was created by another program meanwhile; nothing was written to it")
        os.rename(temporary, path)
        sync_folder(os.path.dirname(os.path.abspath(path)))


def sync_folder(path: str) -> None:
    """Flush the entries of a folder."""
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def discard(temporary: str) -> None:
    """Remove an unfinished result."""
    if os.path.isdir(temporary):
        shutil.rmtree(temporary, ignore_errors=True)
    elif os.path.lexists(temporary):
        os.unlink(temporary)
