"""The sizes of the pieces a placement splits a dimension into, and the placement that gives certain sizes."""

from __future__ import annotations

from typing import Any

import numpy as np

from shardwright.layout import Placement, Ragged, Shard

__all__ = ["evenly", "piece_sizes"]


def piece_sizes(size: int, placement: Shard | Ragged, ranks: int) -> Any:
    """How long the pieces are into which a placement alone cuts a dimension, as an array."""
    if isinstance(placement, Ragged):
        return np.array(placement.sizes)
    chunk = -(-size // ranks)
    starts = np.minimum(np.arange(ranks) * chunk, size)
    return np.minimum(chunk, size - starts)


def evenly(dim: int, sizes: tuple[int, ...], size: int, ranks: int) -> Placement:
    """`Shard` where that is what the sizes are, `Ragged` elsewhere."""
    even = tuple(piece_sizes(size, Shard(dim), ranks).tolist())
    return Shard(dim) if sizes == even else Ragged(dim, sizes)
