"""What a checkpoint needs of the place it is kept in: bytes under keys, written once, read by ranges. No tensors."""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Sequence
from contextlib import AbstractContextManager

from shardwright.errors import StorageError

__all__ = ["Reader", "Storage", "Writer", "check_key"]

_KEY = re.compile(r"[0-9a-z][0-9a-z.-]{0,200}")


class Writer(ABC):
    """A new object under a key, being written. It exists for readers from `finish` on, if not before.

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
        """Puts the buffers one after the other, from this offset on. Threads may write different ranges."""

    @abstractmethod
    def finish(self) -> None:
        """Returns when the object is safe: it outlives a crash of the machine from now on.

        Where it raises, nothing is known of the object: give it up with `abort`, and write another.
        """

    @abstractmethod
    def abort(self) -> None:
        """Gives up: removes what was written. Doing it twice, or after `finish` has returned, changes nothing."""


class Reader(ABC):
    """An object being read. It stays readable while it is open, even if it is deleted meanwhile.

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
        """How many bytes it has."""

    @abstractmethod
    def read(self, buffers: Sequence[memoryview], offset: int) -> None:
        """Fills the buffers one after the other with what lies from this offset on; all of it, or it raises.

        It raises, too, where the object has become longer or shorter since it was opened.
        """

    @abstractmethod
    def close(self) -> None:
        """Ends reading. Doing it twice changes nothing."""

    def __enter__(self) -> Reader:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class Storage(ABC):
    """A place that holds one checkpoint: a flat set of keys, any of which can be replaced atomically.

    Make a subclass for a place of another kind, and let it pass `shardwright.testing.StorageContract`. Keys have
    small letters, digits, dots and hyphens. Everything raises `StorageError`.

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
        """Whether the ranks of a job that name this place mean one place, as they do a folder."""
        return True

    @abstractmethod
    def prepare(self) -> None:
        """Makes the place, if it is not there."""

    @abstractmethod
    def create(self, key: str) -> Writer:
        """A new object under a key that does not exist yet."""

    @abstractmethod
    def open(self, key: str) -> Reader:
        """The object under a key; `MissingKeyError` where there is none."""

    @abstractmethod
    def replace(self, key: str, data: bytes) -> None:
        """Puts these bytes under a key, in place of what was there: readers see the one or the other, never both.

        When it returns the new bytes are safe, and so is everything that was finished before. Where it raises, the
        one or the other is there.
        """

    @abstractmethod
    def list_keys(self) -> list[str]:
        """All keys, in order."""

    @abstractmethod
    def delete(self, key: str) -> None:
        """Removes a key; one that is not there is removed already."""

    @abstractmethod
    def lock(self) -> AbstractContextManager[None]:
        """While it lasts nobody else holds the lock of this place: `StorageBusyError` where somebody does.

        It ends with the process that holds it, however that ends.
        """


def check_key(key: str) -> str:
    """The key, if it is one: it can name nothing outside its place.

    >>> check_key("5f3a9c-00000-0.safetensors")
    '5f3a9c-00000-0.safetensors'
    """
    if not _KEY.fullmatch(key):
        raise StorageError(
            f"key {key!r}: keys have small letters, digits, dots and hyphens, and no folders, begin with a letter or "
            "a digit, and have at most 201 characters"
        )
    return key
