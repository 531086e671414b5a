"""Which boxes travel from which shard to which, when shards become others. Pure, for any rank in any process.

A receiver takes exactly what its new shards lack, from one rank that holds it: no byte moves that need not.
"""

from __future__ import annotations

from typing import NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt

from shardwright.layout import Boxes, Region, RegionTable, overlaps

__all__ = ["TransferPlan", "holds", "plan_transfer", "plan_transfer_for_rank"]

Integers: TypeAlias = npt.NDArray[np.int64]


class TransferPlan(NamedTuple):
    """Row k says: the box of `offsets[k]` and `sizes[k]` goes from shard `sources[k]`, which rank `senders[k]` holds,
    into shard `targets[k]` of rank `receivers[k]`; it stays where it is if they are the same rank.

    >>> rows = RegionTable(np.array([0, 1]), np.array([[0], [2]]), np.array([[2], [2]]))
    >>> one = RegionTable(np.array([1]), np.array([[0]]), np.array([[4]]))
    >>> moves = plan_transfer(rows, one)
    >>> moves.senders.tolist(), moves.receivers.tolist(), moves.received(1, itemsize=4)
    ([0, 1], [1, 1], 8)
    """

    sources: Integers
    targets: Integers
    senders: Integers
    receivers: Integers
    offsets: Integers
    sizes: Integers

    def received(self, rank: int, itemsize: int) -> int:
        """How many bytes this rank receives from others."""
        coming = (self.receivers == rank) & (self.senders != rank)
        return int(self.sizes[coming].prod(axis=1).sum()) * itemsize

    def sent(self, rank: int, itemsize: int) -> int:
        """How many bytes this rank sends to others."""
        going = (self.senders == rank) & (self.receivers != rank)
        return int(self.sizes[going].prod(axis=1).sum()) * itemsize

    def region(self, row: int) -> Region:
        """The box of a row."""
        return Region(self.offsets[row].tolist(), self.sizes[row].tolist())

    def __str__(self) -> str:
        away = self.senders != self.receivers
        elements = int(self.sizes[away].prod(axis=1).sum())
        return f"{int(away.sum())} boxes of {elements} elements travel, {int((~away).sum())} boxes stay"


def plan_transfer(source: RegionTable, target: RegionTable) -> TransferPlan:
    """All moves of all ranks, by number of the source shard, then of the target shard.

    The source shards are disjoint, or they are whole replicas of each other: then a rank that has one keeps to it, and
    the others take turns to give. Target shards may be held by several ranks, each of which receives its own.

    >>> copies = RegionTable(np.array([0, 1]), np.array([[0], [0]]), np.array([[4], [4]]))
    >>> wanted = RegionTable(np.array([1, 2]), np.array([[0], [2]]), np.array([[2], [2]]))
    >>> moves = plan_transfer(copies, wanted)
    >>> print(moves)
    1 boxes of 2 elements travel, 1 boxes stay
    """
    return _in_order(_from(source, _all_of(source), target, _all_of(target)))


def plan_transfer_for_rank(source: RegionTable, target: RegionTable, rank: int) -> TransferPlan:
    """The moves that this rank has part in, in the order in which all ranks list them.

    >>> rows = RegionTable(np.array([0, 1]), np.array([[0], [2]]), np.array([[2], [2]]))
    >>> swapped = RegionTable(np.array([1, 0]), np.array([[0], [2]]), np.array([[2], [2]]))
    >>> [(s, r) for s, r in zip(*plan_transfer_for_rank(rows, swapped, 0)[2:4])] == [(0, 1), (1, 0)]
    True
    """
    mine, ours = np.flatnonzero(source.ranks == rank), np.flatnonzero(target.ranks == rank)
    going = _from(source, mine, target, _all_of(target))
    coming = _from(source, _all_of(source), target, ours)
    # What stays is among what comes.
    away = np.flatnonzero((going.senders == rank) & (going.receivers != rank))
    return _in_order(TransferPlan(*(np.concatenate([a[away], b]) for a, b in zip(going, coming, strict=True))))


def holds(source: RegionTable, target: RegionTable) -> bool:
    """Whether every rank has each of its target shards as a source shard already: nothing moves, nothing is copied.

    >>> rows = RegionTable(np.array([0, 1]), np.array([[0], [2]]), np.array([[2], [2]]))
    >>> second = RegionTable(np.array([1, 0]), np.array([[2], [9]]), np.array([[2], [0]]))
    >>> holds(rows, second), holds(second, rows)
    (True, False)
    """
    return _distinct(source) >= _distinct(target)


def _distinct(table: RegionTable) -> set[tuple[int, ...]]:
    """Rank and box of every shard that is not empty."""
    full = (table.sizes > 0).all(axis=1)
    return set(map(tuple, np.column_stack([table.ranks, table.offsets, table.sizes])[full].tolist()))


def _from(source: RegionTable, rows: Integers, target: RegionTable, columns: Integers) -> TransferPlan:
    """The moves from these source shards, or from their replicas, into these target shards."""
    boxes = Boxes(target.offsets[columns], target.sizes[columns])
    if _has_replicas(source):
        givers = _Givers(source)
        kinds = np.unique(givers.kinds[rows])
        found = overlaps(Boxes(givers.boxes.offsets[kinds], givers.boxes.sizes[kinds]), boxes)
        second = columns[found.second]
        first = givers.choose(kinds[found.first], second, target.ranks[second])
    else:
        found = overlaps(Boxes(source.offsets[rows], source.sizes[rows]), boxes)
        first, second = rows[found.first], columns[found.second]
    return TransferPlan(first, second, source.ranks[first], target.ranks[second], found.offsets, found.sizes)


def _has_replicas(table: RegionTable) -> bool:
    """Whether its boxes, which leave no gap, hold more elements than there are."""
    full = (table.sizes > 0).all(axis=1)
    offsets, sizes = table.offsets[full], table.sizes[full]
    if not len(sizes):
        return False
    around = (offsets + sizes).max(axis=0) - offsets.min(axis=0)
    return bool(sizes.prod(axis=1).sum() > around.prod())


class _Givers:
    """Boxes that several ranks hold, each once, and who gives a part of one to whom: the same answer on all ranks."""

    def __init__(self, source: RegionTable) -> None:
        rows = np.column_stack([source.offsets, source.sizes, np.zeros(len(source.ranks), np.int64)])
        _, firsts, kinds = np.unique(rows, axis=0, return_index=True, return_inverse=True)
        self.kinds = kinds.reshape(-1)
        self.boxes = Boxes(source.offsets[firsts], source.sizes[firsts])
        self._rows = np.lexsort((source.ranks, self.kinds))  # by box, then by rank
        self._counts = np.bincount(self.kinds)
        self._starts = np.cumsum(self._counts) - self._counts
        self._width = int(source.ranks.max()) + 1
        self._held = self.kinds[self._rows] * self._width + source.ranks[self._rows]

    def choose(self, kinds: Integers, targets: Integers, receivers: Integers) -> Integers:
        """For each box, and the target shard it goes into: the source shard it is taken from."""
        sought = np.where(receivers < self._width, kinds * self._width + receivers, -1)
        place = np.minimum(np.searchsorted(self._held, sought), len(self._held) - 1)
        turn = self._starts[kinds] + (kinds + targets) % self._counts[kinds]
        return self._rows[np.where(self._held[place] == sought, place, turn)]


def _in_order(moves: TransferPlan) -> TransferPlan:
    order = np.lexsort((moves.targets, moves.sources))
    return TransferPlan(*(column[order] for column in moves))


def _all_of(table: RegionTable) -> Integers:
    return np.arange(len(table.ranks))
