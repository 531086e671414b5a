"""Storage in the memory of this process: for tests, and for passing on a checkpoint without a disk."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import final

from shardwright.errors import MissingKeyError, StorageBusyError, StorageError
from shardwright.storage.base import Reader, Storage, Writer, check_key

__all__ = ["MemoryStorage"]


@final
class MemoryStorage(Storage):
    """Objects in memory, for the threads of one process. Other ranks do not see them.

    >>> import torch
    >>> from shardwright import checkpoint
    >>> place = MemoryStorage()
    >>> checkpoint.save({"w": torch.ones(2)}, place)
    >>> checkpoint.read(place)
    {'w': tensor([1., 1.])}
    """

    def __init__(self) -> None:
        self._objects: dict[str, _Object] = {}
        self._guard = threading.Lock()  # guards the table
        self._busy = threading.Lock()  # held by `lock`

    def __repr__(self) -> str:
        return f"MemoryStorage({len(self._objects)} keys)"

    def __reduce__(self) -> str:
        raise StorageError("a MemoryStorage lives in one process; a copy in another process would be another storage")

    @property
    def is_shared(self) -> bool:
        """False: it is private to this process."""
        return False

    def prepare(self) -> None:
        """Do nothing: there is nothing to create."""

    def create(self, key: str) -> Writer:
        """Create an empty object."""
        stored = _Object()
        with self._guard:
            if check_key(key) in self._objects:
                raise StorageError(f"cannot create {key!r}: it exists")
            self._objects[key] = stored
        return _MemoryWriter(self, key, stored)

    def open(self, key: str) -> Reader:
        """Open an object as it is now."""
        with self._guard:
            stored = self._objects.get(check_key(key))
        if stored is None:
            raise MissingKeyError(f"{key!r} does not exist")
        return _MemoryReader(key, stored)

    def replace(self, key: str, data: bytes) -> None:
        """Put a new object under the key; readers of the previous one keep it."""
        stored = _Object()
        stored.put([memoryview(data)], 0)
        with self._guard:
            self._objects[check_key(key)] = stored

    def list_keys(self) -> list[str]:
        """Return all keys, in order."""
        with self._guard:
            return sorted(self._objects)

    def delete(self, key: str) -> None:
        """Remove the object from the table; readers keep it."""
        with self._guard:
            self._objects.pop(check_key(key), None)

    @contextmanager
    def lock(self) -> Iterator[None]:
        """Exclude the other threads."""
        if not self._busy.acquire(blocking=False):
            raise StorageBusyError("another thread is saving a checkpoint to this MemoryStorage")
        try:
            yield
        finally:
            self._busy.release()

    def _remove(self, key: str, stored: _Object) -> None:
        """Remove this object, but not another one that has its key by now."""
        with self._guard:
            if self._objects.get(key) is stored:
                del self._objects[key]


@final
class _Object:
    """Bytes that grow while they are written. No view of them is kept: they could not grow then."""

    def __init__(self) -> None:
        self._data = bytearray()
        self._guard = threading.Lock()

    def __len__(self) -> int:
        return len(self._data)

    def put(self, buffers: Sequence[memoryview], offset: int) -> None:
        end = offset + sum(buffer.nbytes for buffer in buffers)
        with self._guard:
            if end > offset:  # an empty write far out does not extend a file
                self._data.extend(bytes(max(0, end - len(self._data))))
            for buffer in buffers:
                self._data[offset : offset + buffer.nbytes] = buffer.cast("B")
                offset += buffer.nbytes

    def get(self, buffers: Sequence[memoryview], offset: int) -> None:
        with self._guard, memoryview(self._data) as data:
            for buffer in buffers:
                buffer.cast("B")[:] = data[offset : offset + buffer.nbytes]
                offset += buffer.nbytes


@final
class _MemoryWriter(Writer):
    def __init__(self, storage: MemoryStorage, key: str, stored: _Object) -> None:
        self._storage, self._key, self._object = storage, key, stored
        self._is_open = True

    def write(self, buffers: Sequence[memoryview], offset: int) -> None:
        if not self._is_open:
            raise StorageError(f"cannot write {self._key!r}: its writer is closed")
        if offset < 0:
            raise StorageError(f"cannot write {self._key!r} at {offset}: the offset must not be negative")
        self._object.put(buffers, offset)

    def finish(self) -> None:
        if not self._is_open:
            raise StorageError(f"cannot finish {self._key!r}: its writer is closed")
        self._is_open = False

    def abort(self) -> None:
        if self._is_open:
            self._is_open = False
            self._storage._remove(self._key, self._object)


@final
class _MemoryReader(Reader):
    def __init__(self, key: str, stored: _Object) -> None:
        self._key, self._object = key, stored
        self._size = len(stored)
        self._is_open = True

    @property
    def size(self) -> int:
        return self._size

    def read(self, buffers: Sequence[memoryview], offset: int) -> None:
        if not self._is_open:
            raise StorageError(f"cannot read {self._key!r}: its reader is closed")
        end = offset + sum(buffer.nbytes for buffer in buffers)
        if not 0 <= offset <= end <= self._size:
            raise StorageError(f"{self._key!r} has {self._size} bytes, but bytes {offset} to {end} were requested")
        self._object.get(buffers, offset)
        if len(self._object) != self._size:
            raise StorageError(
                f"{self._key!r} had {self._size} bytes when it was opened and has {len(self._object)} now: "
                "it is being written"
            )

    def close(self) -> None:
        self._is_open = False
