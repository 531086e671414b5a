"""A digest of shards and their owners, which ranks compare."""

from __future__ import annotations

import hashlib

from shardwright.layout import RegionTable

__all__ = ["digest"]


def digest(table: RegionTable) -> str:
    """A short text that tells shards and their owners from others.

    >>> import numpy as np
    >>> digest(RegionTable(np.array([0]), np.array([[0]]), np.array([[4]])))
    '1 shards (af8bdd86ad1ecd71)'
    """
    made = hashlib.blake2b(b"".join(column.tobytes() for column in table), digest_size=8)
    return f"{len(table.ranks)} shards ({made.hexdigest()})"
