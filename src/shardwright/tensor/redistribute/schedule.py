"""Compute which rank sends which region to which, between any two layouts. Pure, and without communication.

A rank lacks what its target region has beyond its source region: a few boxes. The source layout splits each among its
holders. If several ranks hold the same part, the receiver takes it from the one that shares its coordinates in the
mesh dimensions that do not shard the tensor; receivers outside the mesh take turns. So replicas serve equally many
ranks, and both ends compute the same messages. A rank considers only its own peers, never pairs of other ranks.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import final

import numpy as np

from shardwright.layout import Layout, Ragged, Region, Shard

__all__ = ["Message", "Schedule", "held", "missing", "schedule"]


@final
@dataclass(frozen=True, slots=True)
class Message:
    """The boxes sent between this rank and a peer, in the order in which they are packed.

    >>> Message(3, (Region((0,), (4,)),)).volume
    4
    """

    peer: int
    boxes: tuple[Region, ...]

    @property
    def volume(self) -> int:
        """The number of elements in the message."""
        return sum(box.volume for box in self.boxes)


@final
@dataclass(frozen=True, slots=True)
class Schedule:
    """One rank's part of an exchange: what it keeps, receives and sends.

    >>> from shardwright.layout import Mesh
    >>> rows, columns = (Layout(Mesh((2,)), [Shard(dim)], (4, 4)) for dim in (0, 1))
    >>> mine = schedule(rows, columns, 0)
    >>> mine.kept, mine.receives[0].boxes, mine.sends[0].boxes
    (Region[0:2, 0:2], (Region[2:4, 0:2],), (Region[0:2, 2:4],))
    """

    kept: Region | None
    receives: tuple[Message, ...]
    sends: tuple[Message, ...]


def held(layout: Layout, rank: int) -> Region | None:
    """Return the region of a rank, or None if it is not in the mesh or holds nothing.

    >>> from shardwright.layout import Mesh
    >>> held(Layout(Mesh((2,)), [Shard(0)], (4,)), 7) is None
    True
    """
    if rank not in layout.mesh:
        return None
    region = layout.region(rank)
    return None if region.is_empty else region


def missing(before: Layout, after: Layout, rank: int) -> int:
    """Return the number of elements a rank lacks for its region of `after`.

    >>> from shardwright.layout import Mesh, Replicate
    >>> missing(Layout(Mesh((2,)), [Shard(0)], (4,)), Layout(Mesh((2,)), [Replicate()], (4,)), 0)
    2
    """
    want, have = held(after, rank), held(before, rank)
    if want is None:
        return 0
    common = None if have is None else want.intersect(have)
    return want.volume - (0 if common is None else common.volume)


@lru_cache(maxsize=1024)
def schedule(before: Layout, after: Layout, rank: int) -> Schedule:
    """Return what a rank keeps, receives and sends when `before` becomes `after`.

    If `before` is `Partial` in some mesh dimensions, ranks exchange only with those of the same coordinates there.

    >>> from shardwright.layout import Mesh, Replicate
    >>> rows = Layout(Mesh((2, 2)), [Shard(0), Replicate()], (4,))
    >>> [(m.peer, m.boxes) for m in schedule(rows, rows.replace(placements=[Replicate()] * 2), 3).receives]
    [(1, (Region[0:2],))]
    """
    want, have = held(after, rank), held(before, rank)
    kept = None if want is None or have is None else want.intersect(have)
    return Schedule(kept, _receives(before, after, rank), _sends(before, after, rank))


def _lacking(before: Layout, after: Layout, rank: int) -> tuple[Region, ...]:
    want, have = held(after, rank), held(before, rank)
    if want is None:
        return ()
    return (want,) if have is None else want.subtract(have)


def _receives(before: Layout, after: Layout, rank: int) -> tuple[Message, ...]:
    free = _free(before)
    sender = _sender(before, after, free, rank)
    parts_of: dict[int, list[Region]] = {}
    for box in _lacking(before, after, rank):
        for part, ranks in before.holders(box):
            # Holders of one part are listed in row-major order of the free mesh dimensions.
            parts_of.setdefault(ranks[sender], []).append(part)
    return tuple(Message(peer, tuple(boxes)) for peer, boxes in sorted(parts_of.items()))


def _sends(before: Layout, after: Layout, rank: int) -> tuple[Message, ...]:
    have = held(before, rank)
    if have is None:
        return ()
    free = _free(before)
    mine = _free_index(before, free, rank)
    messages = []
    for peer in {peer for _, ranks in after.holders(have) for peer in ranks} - {rank}:
        if _sender(before, after, free, peer) == mine:
            parts = (have.intersect(box) for box in _lacking(before, after, peer))
            if boxes := tuple(part for part in parts if part is not None):
                messages.append(Message(peer, boxes))
    return tuple(sorted(messages, key=lambda message: message.peer))


def _free(layout: Layout) -> tuple[int, ...]:
    """Return the mesh dimensions that do not shard the tensor, along which ranks hold replicas or partial values."""
    return tuple(m for m, placement in enumerate(layout.placements) if not isinstance(placement, Shard | Ragged))


def _free_index(layout: Layout, free: tuple[int, ...], rank: int) -> int:
    """Return the row-major index of a rank within the free mesh dimensions."""
    coordinate = layout.mesh.coordinate(rank)
    index = 0
    for mesh_dim in free:
        index = index * layout.mesh.shape[mesh_dim] + coordinate[mesh_dim]
    return index


def _sender(before: Layout, after: Layout, free: tuple[int, ...], rank: int) -> int:
    """Return the index of the sender among the ranks that hold the same part."""
    if rank in before.mesh:
        return _free_index(before, free, rank)
    replicas = int(np.prod([before.mesh.shape[m] for m in free], dtype=np.int64))
    return after.mesh.position(rank) % replicas
