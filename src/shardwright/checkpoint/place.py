"""Where a checkpoint is, as callers say it: a path, or a storage."""

from __future__ import annotations

import os
from typing import Any

from shardwright.errors import ArgumentTypeError
from shardwright.storage import LocalStorage, Storage

__all__ = ["storage_at"]


def storage_at(path: Any) -> Storage:
    """The storage that a caller names.

    >>> storage_at("/tmp/step-1000")
    LocalStorage('/tmp/step-1000')
    """
    if isinstance(path, Storage):
        return path
    if isinstance(path, str | os.PathLike):
        return LocalStorage(path)
    raise ArgumentTypeError(f"{type(path).__name__} is neither a path nor a Storage")
