"""The interface between checkpoints and storage: bytes under keys, written once, read by ranges. No tensors."""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Sequence
from contextlib import AbstractContextManager

from shardwright.errors import StorageError

__all__ = ["Reader", "Storage", "Writer", "check_key"]

_KEY = re.compile(r"[0-9a-z][0-9a-z.-]{0,200}")


class Writer(ABC):
    """A new object under a key, being written. Readers can open it after `finish`, or earlier.

    >>> from shardwright.storage import MemoryStorage
    >>> storage = MemoryStorage()
    >>> writer = storage.create("greeting")
    >>> writer.write([memoryview(b"hel"), memoryview(b"lo")], offset=0)
    >>> writer.finish()
    >>> storage.open("greeting").size
    5
    """

    @abstractmethod
    def write(self, buffers: Sequence[memoryview], offset: int) -> None:
        """Write the buffers one after the other, starting at this offset. Threads may write different ranges."""

    @abstractmethod
    def finish(self) -> None:
        """Flush the object: once this returns, it survives a crash of the machine.

        If it raises, the state of the object is unknown: give it up with `abort`, and write another.
        """

    @abstractmethod
    def abort(self) -> None:
        """Remove what was written. Calling it twice, or after `finish` has returned, has no effect."""


class Reader(ABC):
    """An object being read. It remains readable while it is open, even if it is deleted meanwhile.

    >>> from shardwright.storage import MemoryStorage
    >>> storage = MemoryStorage()
    >>> storage.replace("greeting", b"hello")
    >>> two = bytearray(2)
    >>> with storage.open("greeting") as reader:
    ...     reader.read([memoryview(two)], offset=1)
    >>> two
    bytearray(b'el')
    """

    @property
    @abstractmethod
    def size(self) -> int:
        """The size of the object in bytes."""

    @abstractmethod
    def read(self, buffers: Sequence[memoryview], offset: int) -> None:
        """Fill the buffers one after the other, starting at this offset; fill all of them, or raise.

        It also raises if the object has become longer or shorter since it was opened.
        """

    @abstractmethod
    def close(self) -> None:
        """Stop reading. Calling it twice has no effect."""

    def __enter__(self) -> Reader:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class Storage(ABC):
    """A location that holds one checkpoint: a flat set of keys, each of which can be replaced atomically.

    Subclass it for another kind of storage, and let the subclass pass `shardwright.testing.StorageContract`. Keys have
    lowercase letters, digits, dots and hyphens. All errors are `StorageError`s.

    >>> from shardwright.storage import MemoryStorage
    >>> storage = MemoryStorage()
    >>> storage.prepare()
    >>> with storage.lock():
    ...     storage.replace("manifest.json", b"{}")
    >>> storage.list_keys()
    ['manifest.json']
    """

    @property
    def is_shared(self) -> bool:
        """True if all ranks of a job that name this location access the same one, as for a directory."""
        return True

    @abstractmethod
    def prepare(self) -> None:
        """Create the location if it does not exist."""

    @abstractmethod
    def create(self, key: str) -> Writer:
        """Create an object under a key that does not exist yet."""

    @abstractmethod
    def open(self, key: str) -> Reader:
        """Open the object under a key; raise `MissingKeyError` if there is none."""

    @abstractmethod
    def replace(self, key: str, data: bytes) -> None:
        """Atomically replace the object under a key: readers see the old bytes or the new ones, never a mixture.

        Once this returns, the new bytes and everything that was finished before are durable. If it raises, either the
        old or the new object is there.
        """

    @abstractmethod
    def list_keys(self) -> list[str]:
        """Return all keys, in order."""

    @abstractmethod
    def delete(self, key: str) -> None:
        """Delete a key; a missing key is not an error."""

    @abstractmethod
    def lock(self) -> AbstractContextManager[None]:
        """Hold the lock of this location; raise `StorageBusyError` if another process holds it.

        It is released when the process ends, however it ends.
        """


def check_key(key: str) -> str:
    """Return the key if it is valid: a valid key cannot name anything outside its location.

    >>> check_key("5f3a9c-00000-0.safetensors")
    '5f3a9c-00000-0.safetensors'
    """
    if not _KEY.fullmatch(key):
        raise StorageError(
            f"invalid key {key!r}: keys have lowercase letters, digits, dots and hyphens, begin with a letter or a "
            "digit, "
            "have no directories, and have at most 201 characters"
        )
    return key
