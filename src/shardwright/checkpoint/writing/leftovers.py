"""Recognise the files that saves create, by their names and first bytes, so that only those are removed."""

from __future__ import annotations

import re

from shardwright.checkpoint.format.data_file import START
from shardwright.errors import MissingKeyError
from shardwright.storage import Storage

__all__ = ["is_save_file", "may_be_removed"]

_DATA = re.compile(r"[0-9a-f]{12}-[0-9]{5,6}-0\.safetensors")
_TOKEN = re.compile(r"[0-9a-f]{12}\.begun")
_TEMPORARY = re.compile(r"manifest\.json\.[0-9a-f]{12}\.tmp")


def is_save_file(key: str) -> bool:
    """Return True if a key is named like a file that a save creates (other than the manifest).

    That is a data file, a temporary manifest, or the token that the first rank creates for the others.

    >>> list(map(is_save_file, ["5f3a9c21b07e-00000-0.safetensors", "5f3a9c21b07e.begun", "model-00001-2.safetensors"]))
    [True, True, False]
    """
    return bool(_DATA.fullmatch(key) or _TEMPORARY.fullmatch(key) or _TOKEN.fullmatch(key))


def may_be_removed(storage: Storage, key: str) -> bool:
    """Return True if a save created this file: a data file must also begin like one.

    A file that a crash truncated or left without its header counts: it is shorter than the beginning of a header, or
    has zeros in place of it, from some byte on.

    >>> from shardwright.storage import MemoryStorage
    >>> place = MemoryStorage()
    >>> place.replace("5f3a9c21b07e-00000-0.safetensors", b"a file of the user's, which is not a checkpoint")
    >>> may_be_removed(place, "5f3a9c21b07e-00000-0.safetensors")
    False
    """
    if not is_save_file(key):
        return False
    if not _DATA.fullmatch(key):
        return True
    try:
        with storage.open(key) as reader:
            begin = bytearray(8 + len(START))
            if reader.size < len(begin):
                return True
            reader.read([memoryview(begin)], 0)
    except MissingKeyError:
        return False
    return START.startswith(bytes(begin[8:]).rstrip(b"\0"))
