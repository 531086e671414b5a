"""How replicas share their work: the ranks that hold the same regions write them once, an equal part each. Pure.

The bytes of all tensors that a set of ranks holds alike are laid end to end, in the order of the state; rank q of R
takes the q-th R-th, and a tensor that lies across the boundary is cut there. Who writes a given tensor follows from
one array of sums, so nobody needs to ask.
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
    """Elements `first` to `last` (exclusive) of what the ranks of a share hold of a tensor, written by one of them."""

    rank: int
    first: int
    last: int


@final
@dataclass(frozen=True, eq=False)
class ReplicaSplit:
    """The tensors that these ranks hold alike, and where each begins in all their bytes laid end to end."""

    ranks: tuple[int, ...]
    tensors: Integers
    volumes: Integers
    itemsizes: Integers
    sizes: list[tuple[int, ...]]  # of each kind of placing
    kinds: Integers
    ends: Integers

    @property
    def total(self) -> int:
        """All bytes."""
        return int(self.ends[-1]) if self.ends.size else 0

    def bound(self, place: int) -> int:
        """Where the part of the rank at this place begins."""
        return place * self.total // len(self.ranks)

    def point(self, number: int, byte: int) -> int:
        """The element of a tensor at which a boundary at this byte cuts it: 0 or its volume where it does not."""
        itemsize, volume = int(self.itemsizes[number]), int(self.volumes[number])
        start = int(self.ends[number]) - volume * itemsize
        if byte <= start:
            return 0
        if byte >= int(self.ends[number]):
            return volume
        step = granularity(self.sizes[self.kinds[number]], itemsize, self.total // len(self.ranks))
        unit = itemsize * step
        cut = (2 * (byte - start) + unit) // (2 * unit) * step  # the nearest; of two, the later
        return min(cut, volume)

    def writers(self, number: int) -> list[Range]:
        """Who writes which stretch of a tensor, by its number here."""
        volume, count = int(self.volumes[number]), len(self.ranks)
        if count == 1:
            return [Range(self.ranks[0], 0, volume)] if volume else []
        end = int(self.ends[number])
        start = end - volume * int(self.itemsizes[number])
        first = max(0, start * count // max(1, self.total) - 1)
        found = []
        for place in range(first, count):
            if self.bound(place) >= end:
                break
            low, high = self.point(number, self.bound(place)), self.point(number, self.bound(place + 1))
            if low < high:
                found.append(Range(self.ranks[place], low, high))
        return found


def replica_splits(table: TensorTable, rank: int) -> list[ReplicaSplit]:
    """The shares that a rank has part in: one for each set of ranks with which it holds tensors alike."""
    sets = dict.fromkeys(
        sharding.replicas(rank)
        for sharding in table.shardings
        if isinstance(sharding, Layout) and rank in sharding.mesh
    )
    return [replica_split(table, ranks) for ranks in sets]


def replica_split(table: TensorTable, ranks: tuple[int, ...]) -> ReplicaSplit:
    """What exactly these ranks hold alike."""
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
