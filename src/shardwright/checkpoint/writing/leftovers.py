"""Files that saves leave behind: told from those of others by their names and by how they begin."""

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
    """Whether a key has the form of what a save makes, besides the manifest.

    That is a data file, a manifest on its way, or what the first rank makes for the others to find.

    >>> list(map(is_save_file, ["5f3a9c21b07e-00000-0.safetensors", "5f3a9c21b07e.begun", "model-00001-2.safetensors"]))
    [True, True, False]
    """
    return bool(_DATA.fullmatch(key) or _TEMPORARY.fullmatch(key) or _TOKEN.fullmatch(key))


def may_be_removed(storage: Storage, key: str) -> bool:
    """Whether a key is that of a file which a save has made: a data file must begin like one, too.

    One that a crash has cut off or left without its header counts: it is shorter than the beginning of a header, or
    has zeros in place of it, from some byte on.

    >>> from shardwright.storage import MemoryStorage
    >>> place = MemoryStorage()
    >>> place.replace("5f3a9c21b07e-00000-0.safetensors", b"somebody's own work, which is no checkpoint")
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
