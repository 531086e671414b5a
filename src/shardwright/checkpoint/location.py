"""Where a checkpoint is and who takes part, as callers say it: a path or a storage, a process group."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

from shardwright import comm
from shardwright.errors import ArgumentTypeError
from shardwright.storage import LocalStorage, Storage

__all__ = ["as_storage", "location_id", "resolve_group"]


def as_storage(path: Any) -> Storage:
    """The storage that a caller names.

    >>> as_storage("/tmp/step-1000")
    LocalStorage('/tmp/step-1000')
    """
    if isinstance(path, Storage):
        return path
    if isinstance(path, str | os.PathLike):
        if isinstance(os.fspath(path), str):
            return LocalStorage(path)
        raise ArgumentTypeError(f"{path!r} is a path of bytes: give text (os.fsdecode)")
    raise ArgumentTypeError(f"{type(path).__name__} is neither a path nor a Storage")


def location_id(storage: Storage) -> str:
    """What tells one place from another in this process: a folder is the same one through a symbolic link.

    >>> location_id(LocalStorage("/"))
    '/'
    """
    if isinstance(storage, LocalStorage):
        return os.path.realpath(storage.path)
    return f"{type(storage).__name__} {id(storage):x}"


def resolve_group(process_group: Any) -> tuple[comm.Group, Callable[[], None]]:
    """The group that a caller names, and a check that belongs into the first step its ranks agree on.

    What is no process group is told to the world by that check: the others are likely to wait there. A group that this
    rank is not in is refused at once: nobody waits for it.

    >>> group, check = resolve_group("all")
    >>> check()
    Traceback (most recent call last):
    shardwright.errors.ArgumentTypeError: process_group='all' is a str: give a torch process group, ...
    """
    try:
        return comm.Group.of(process_group), lambda: None
    except ArgumentTypeError as error:
        wrong = error

    def check() -> None:
        raise wrong

    return comm.world(), check
