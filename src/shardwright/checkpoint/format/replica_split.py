"""Split the writing of replicas: ranks that hold the same regions each write an equal part of them. Pure.

The bytes of all tensors that a set of ranks holds as replicas are concatenated, in the order of the state; rank q of R
writes the q-th of R equal parts, and a tensor that crosses a boundary is split there. The writers of a tensor follow
from one array of cumulative sums, without communication.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple, final

import numpy as np

from shardwright.checkpoint.format.split import granularity
from shardwright.checkpoint.format.tensor_table import Integers, Pieces, TensorTable
from shardwright.layout import Layout

__all__ = ["Range", "ReplicaSplit", "replica_split", "replica_splits"]


class Range(NamedTuple):
    """Elements `first` to `last` (exclusive) of what the ranks hold of a tensor, written by `rank`."""

    rank: int
    first: int
    last: int


@final
@dataclass(frozen=True, eq=False)
class ReplicaSplit:
    """The tensors that exactly these ranks hold as replicas, and where each ends in their concatenated bytes."""

    ranks: tuple[int, ...]
    tensors: Integers
    volumes: Integers
    itemsizes: Integers
    sizes: list[tuple[int, ...]]  # by kind of sharding
    kinds: Integers
    ends: Integers

    @property
    def total(self) -> int:
        """The total number of bytes."""
        return int(self.ends[-1]) if self.ends.size else 0

    def bound(self, index: int) -> int:
        """Return the byte at which the part of the rank with this index begins."""
        return index * self.total // len(self.ranks)

    def point(self, number: int, byte: int) -> int:
        """Return the element at which a boundary at this byte splits a tensor: 0 or its volume if it does not."""
        itemsize, volume = int(self.itemsizes[number]), int(self.volumes[number])
        start = int(self.ends[number]) - volume * itemsize
        if byte <= start:
            return 0
        if byte >= int(self.ends[number]):
            return volume
        granule = granularity(self.sizes[self.kinds[number]], itemsize, self.total // len(self.ranks))
        unit = itemsize * granule
        element = (2 * (byte - start) + unit) // (2 * unit) * granule  # the nearest; the later one of two
        return min(element, volume)

    def writers(self, number: int) -> list[Range]:
        """Return the writers of a tensor (by its index here), each with its range."""
        volume, count = int(self.volumes[number]), len(self.ranks)
        if count == 1:
            return [Range(self.ranks[0], 0, volume)] if volume else []
        end = int(self.ends[number])
        start = end - volume * int(self.itemsizes[number])
        first = max(0, start * count // max(1, self.total) - 1)
        ranges = []
        for index in range(first, count):
            if self.bound(index) >= end:
                break
            low, high = self.point(number, self.bound(index)), self.point(number, self.bound(index + 1))
            if low < high:
                ranges.append(Range(self.ranks[index], low, high))
        return ranges


def replica_splits(table: TensorTable, rank: int) -> list[ReplicaSplit]:
    """Return the splits that a rank takes part in: one for each set of ranks with which it holds replicas."""
    sets = dict.fromkeys(
        sharding.replicas(rank)
        for sharding in table.shardings
        if isinstance(sharding, Layout) and rank in sharding.mesh
    )
    return [replica_split(table, ranks) for ranks in sets]


def replica_split(table: TensorTable, ranks: tuple[int, ...]) -> ReplicaSplit:
    """Return the split of the tensors that exactly these ranks hold."""
    rank = ranks[0]
    member = np.zeros(len(table.shardings), bool)
    volumes = np.zeros(len(table.shardings), np.int64)
    sizes: list[tuple[int, ...]] = []
    for kind, sharding in enumerate(table.shardings):
        sizes.append(())
        if isinstance(sharding, Pieces) or rank not in sharding.mesh or sharding.replicas(rank) != ranks:
            continue
        region = sharding.region(rank)
        member[kind], volumes[kind], sizes[kind] = True, region.volume, region.size
    tensors = np.flatnonzero(member[table.kinds])
    kinds = table.kinds[tensors]
    itemsizes = table.itemsizes[tensors]
    return ReplicaSplit(ranks, tensors, volumes[kinds], itemsizes, sizes, kinds, np.cumsum(volumes[kinds] * itemsizes))
