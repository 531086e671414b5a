"""Plan a transfer between two sets of shards: which box goes from which shard to which. Pure.

Receivers fetch exactly what they lack, from one holder.
"""

from __future__ import annotations

from typing import NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt

from shardwright.layout import Boxes, Region, RegionTable, overlaps

__all__ = ["TransferPlan", "holds", "plan_transfer", "plan_transfer_for_rank"]

Integers: TypeAlias = npt.NDArray[np.int64]


class TransferPlan(NamedTuple):
    """Transfers as columns. Row k: the box of `offsets[k]` and `sizes[k]` goes from shard `sources[k]` of rank
    `senders[k]` into shard `targets[k]` of rank `receivers[k]`; a local copy if the ranks are the same.

    >>> rows = RegionTable(np.array([0, 1]), np.array([[0], [2]]), np.array([[2], [2]]))
    >>> one = RegionTable(np.array([1]), np.array([[0]]), np.array([[4]]))
    >>> plan = plan_transfer(rows, one)
    >>> plan.senders.tolist(), plan.receivers.tolist(), plan.received(1, itemsize=4)
    ([0, 1], [1, 1], 8)
    """

    sources: Integers
    targets: Integers
    senders: Integers
    receivers: Integers
    offsets: Integers
    sizes: Integers

    def received(self, rank: int, itemsize: int) -> int:
        """Return the number of bytes this rank receives from others."""
        coming = (self.receivers == rank) & (self.senders != rank)
        return int(self.sizes[coming].prod(axis=1).sum()) * itemsize

    def sent(self, rank: int, itemsize: int) -> int:
        """Return the number of bytes this rank sends to others."""
        going = (self.senders == rank) & (self.receivers != rank)
        return int(self.sizes[going].prod(axis=1).sum()) * itemsize

    def region(self, row: int) -> Region:
        """Return the box of a row."""
        return Region(self.offsets[row].tolist(), self.sizes[row].tolist())

    def __str__(self) -> str:
        away = self.senders != self.receivers
        elements = int(self.sizes[away].prod(axis=1).sum())
        return f"{int(away.sum())} boxes of {elements} elements travel, {int((~away).sum())} boxes stay"


def plan_transfer(source: RegionTable, target: RegionTable) -> TransferPlan:
    """Return the transfers of all ranks, ordered by source shard, then target shard.

    Source shards must be disjoint or exact replicas of each other: a rank that holds a replica uses its own, others are
    served by the holders in turn. Several ranks may hold the same target shard; each receives its own copy.

    >>> copies = RegionTable(np.array([0, 1]), np.array([[0], [0]]), np.array([[4], [4]]))
    >>> wanted = RegionTable(np.array([1, 2]), np.array([[0], [2]]), np.array([[2], [2]]))
    >>> plan = plan_transfer(copies, wanted)
    >>> print(plan)
    1 boxes of 2 elements travel, 1 boxes stay
    """
    return _in_order(_from(source, _all_of(source), target, _all_of(target)))


def plan_transfer_for_rank(source: RegionTable, target: RegionTable, rank: int) -> TransferPlan:
    """Return the transfers in which this rank takes part, in the order of `plan_transfer`.

    >>> rows = RegionTable(np.array([0, 1]), np.array([[0], [2]]), np.array([[2], [2]]))
    >>> swapped = RegionTable(np.array([1, 0]), np.array([[0], [2]]), np.array([[2], [2]]))
    >>> [(s, r) for s, r in zip(*plan_transfer_for_rank(rows, swapped, 0)[2:4])] == [(0, 1), (1, 0)]
    True
    """
    source_rows, target_rows = np.flatnonzero(source.ranks == rank), np.flatnonzero(target.ranks == rank)
    going = _from(source, source_rows, target, _all_of(target))
    coming = _from(source, _all_of(source), target, target_rows)
    # Local copies are part of `coming`.
    away = np.flatnonzero((going.senders == rank) & (going.receivers != rank))
    return _in_order(TransferPlan(*(np.concatenate([a[away], b]) for a, b in zip(going, coming, strict=True))))


def holds(source: RegionTable, target: RegionTable) -> bool:
    """True if every rank already holds each of its target shards as a source shard, so that nothing is transferred.

    >>> rows = RegionTable(np.array([0, 1]), np.array([[0], [2]]), np.array([[2], [2]]))
    >>> second = RegionTable(np.array([1, 0]), np.array([[2], [9]]), np.array([[2], [0]]))
    >>> holds(rows, second), holds(second, rows)
    (True, False)
    """
    return _distinct(source) >= _distinct(target)


def _distinct(table: RegionTable) -> set[tuple[int, ...]]:
    """Return rank and box of every non-empty shard."""
    full = (table.sizes > 0).all(axis=1)
    return set(map(tuple, np.column_stack([table.ranks, table.offsets, table.sizes])[full].tolist()))


def _from(source: RegionTable, rows: Integers, target: RegionTable, columns: Integers) -> TransferPlan:
    """Return the transfers from these source shards, or their replicas, into these target shards."""
    boxes = Boxes(target.offsets[columns], target.sizes[columns])
    if _has_replicas(source):
        replicas = _Replicas(source)
        distinct = np.unique(replicas.box_of_row[rows])
        overlap = overlaps(Boxes(replicas.boxes.offsets[distinct], replicas.boxes.sizes[distinct]), boxes)
        second = columns[overlap.second]
        first = replicas.choose(distinct[overlap.first], second, target.ranks[second])
    else:
        overlap = overlaps(Boxes(source.offsets[rows], source.sizes[rows]), boxes)
        first, second = rows[overlap.first], columns[overlap.second]
    return TransferPlan(first, second, source.ranks[first], target.ranks[second], overlap.offsets, overlap.sizes)


def _has_replicas(table: RegionTable) -> bool:
    """True if its boxes, which leave no gap, have more elements than the tensor."""
    full = (table.sizes > 0).all(axis=1)
    offsets, sizes = table.offsets[full], table.sizes[full]
    if not len(sizes):
        return False
    around = (offsets + sizes).max(axis=0) - offsets.min(axis=0)
    return bool(sizes.prod(axis=1).sum() > around.prod())


class _Replicas:
    """The distinct boxes of a table, and which holder of a box sends it to whom. The same on all ranks."""

    def __init__(self, source: RegionTable) -> None:
        rows = np.column_stack([source.offsets, source.sizes, np.zeros(len(source.ranks), np.int64)])
        _, firsts, box_of_row = np.unique(rows, axis=0, return_index=True, return_inverse=True)
        self.box_of_row = box_of_row.reshape(-1)
        self.boxes = Boxes(source.offsets[firsts], source.sizes[firsts])
        self._rows = np.lexsort((source.ranks, self.box_of_row))  # by box, then by rank
        self._counts = np.bincount(self.box_of_row)
        self._starts = np.cumsum(self._counts) - self._counts
        self._width = int(source.ranks.max()) + 1
        self._held = self.box_of_row[self._rows] * self._width + source.ranks[self._rows]

    def choose(self, boxes: Integers, targets: Integers, receivers: Integers) -> Integers:
        """Return the source shard from which each of these boxes is sent into its target shard."""
        sought = np.where(receivers < self._width, boxes * self._width + receivers, -1)
        index = np.minimum(np.searchsorted(self._held, sought), len(self._held) - 1)
        in_turn = self._starts[boxes] + (boxes + targets) % self._counts[boxes]
        return self._rows[np.where(self._held[index] == sought, index, in_turn)]


def _in_order(plan: TransferPlan) -> TransferPlan:
    order = np.lexsort((plan.targets, plan.sources))
    return TransferPlan(*(column[order] for column in plan))


def _all_of(table: RegionTable) -> Integers:
    return np.arange(len(table.ranks))
