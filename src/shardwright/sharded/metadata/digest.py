"""A digest of shards and their owners, for comparison between ranks."""

from __future__ import annotations

import hashlib

from shardwright.layout import RegionTable

__all__ = ["digest"]


def digest(table: RegionTable) -> str:
    """Return a short text that identifies the shards and their owners.

    >>> import numpy as np
    >>> digest(RegionTable(np.array([0]), np.array([[0]]), np.array([[4]])))
    '1 shards (af8bdd86ad1ecd71)'
    """
    digest = hashlib.blake2b(b"".join(column.tobytes() for column in table), digest_size=8)
    return f"{len(table.ranks)} shards ({digest.hexdigest()})"
