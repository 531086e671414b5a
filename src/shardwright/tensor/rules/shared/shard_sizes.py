"""Sizes of the shards of a dimension, and the placement that gives certain sizes."""

from __future__ import annotations

from typing import Any

import numpy as np

from shardwright.layout import Placement, Ragged, Shard

__all__ = ["shard_sizes", "sized_placement"]


def shard_sizes(size: int, placement: Shard | Ragged, ranks: int) -> Any:
    """Return an array of the sizes of the shards that a placement alone splits a dimension into."""
    if isinstance(placement, Ragged):
        return np.array(placement.sizes)
    chunk = -(-size // ranks)
    starts = np.minimum(np.arange(ranks) * chunk, size)
    return np.minimum(chunk, size - starts)


def sized_placement(dim: int, sizes: tuple[int, ...], size: int, ranks: int) -> Placement:
    """Return `Shard` if the sizes are those of an even split, else `Ragged`."""
    even = tuple(shard_sizes(size, Shard(dim), ranks).tolist())
    return Shard(dim) if sizes == even else Ragged(dim, sizes)
