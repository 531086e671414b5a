"""Resolve the `path` and `process_group` arguments of the public functions."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

from shardwright import comm
from shardwright.errors import ArgumentTypeError
from shardwright.storage import LocalStorage, Storage

__all__ = ["as_storage", "location_id", "resolve_group"]


def as_storage(path: Any) -> Storage:
    """Return the storage for a path; a `Storage` is returned unchanged.

    >>> as_storage("/tmp/step-1000")
    LocalStorage('/tmp/step-1000')
    """
    if isinstance(path, Storage):
        return path
    if isinstance(path, str | os.PathLike):
        if isinstance(os.fspath(path), str):
            return LocalStorage(path)
        raise ArgumentTypeError(f"path must be a str, got bytes: {path!r}; decode it with os.fsdecode")
    raise ArgumentTypeError(f"path must be a str, os.PathLike or Storage, got {type(path).__name__}")


def location_id(storage: Storage) -> str:
    """Return a key that identifies a location within this process, with symbolic links resolved.

    >>> location_id(LocalStorage("/"))
    '/'
    """
    if isinstance(storage, LocalStorage):
        return os.path.realpath(storage.path)
    return f"{type(storage).__name__} {id(storage):x}"


def resolve_group(process_group: Any) -> tuple[comm.Group, Callable[[], None]]:
    """Return the group to use, and a check to run inside the first step that the ranks agree on.

    If `process_group` has the wrong type, the check raises, so that the error reaches the other ranks, which are most
    likely waiting in the default group. A process group that this rank does not belong to is rejected at once: no
    other rank waits for this one.

    >>> group, check = resolve_group("all")
    >>> check()
    Traceback (most recent call last):
    shardwright.errors.ArgumentTypeError: process_group must be a torch process group or None, got str: 'all'
    """
    try:
        return comm.Group.of(process_group), lambda: None
    except ArgumentTypeError as error:
        invalid = error

    def check() -> None:
        raise invalid

    return comm.world(), check
