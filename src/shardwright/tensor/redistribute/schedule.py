"""Who sends what to whom, where regions move between arbitrary layouts. Pure, and no rank needs another's word.

A rank misses what its target region has beyond its source region: a few boxes. Each is cut up by the source layout,
and where several ranks hold the same part, the receiver takes it from the one that shares its coordinates in the mesh
dimensions that do not cut the tensor; a receiver outside the mesh takes turns. So replicas serve equally many, and
both ends know it by arithmetic. A rank looks at those it talks to only, never at pairs of others.
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
    """The boxes that travel between this rank and a peer, in the order in which they are packed.

    >>> Message(3, (Region((0,), (4,)),)).volume
    4
    """

    peer: int
    boxes: tuple[Region, ...]

    @property
    def volume(self) -> int:
        """How many elements it carries."""
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
    """The region of a rank, or None where it is not in the mesh or holds nothing.

    >>> from shardwright.layout import Mesh
    >>> held(Layout(Mesh((2,)), [Shard(0)], (4,)), 7) is None
    True
    """
    if rank not in layout.mesh:
        return None
    region = layout.region(rank)
    return None if region.is_empty else region


def missing(before: Layout, after: Layout, rank: int) -> int:
    """How many elements a rank lacks for its region of `after`.

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
    """What a rank keeps, receives and sends when `before` becomes `after`.

    Where `before` holds addends (`Partial`), each set of them moves by itself: coordinates in those mesh dimensions
    do not change.

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
    turn = _turn(before, after, free, rank)
    found: dict[int, list[Region]] = {}
    for box in _lacking(before, after, rank):
        for part, ranks in before.holders(box):
            # Holders of one part are listed in row-major order of the free mesh dimensions.
            found.setdefault(ranks[turn], []).append(part)
    return tuple(Message(peer, tuple(boxes)) for peer, boxes in sorted(found.items()))


def _sends(before: Layout, after: Layout, rank: int) -> tuple[Message, ...]:
    have = held(before, rank)
    if have is None:
        return ()
    free = _free(before)
    mine = _place(before, free, rank)
    found = []
    for peer in {peer for _, ranks in after.holders(have) for peer in ranks} - {rank}:
        if _turn(before, after, free, peer) == mine:
            parts = (have.intersect(box) for box in _lacking(before, after, peer))
            if boxes := tuple(part for part in parts if part is not None):
                found.append(Message(peer, boxes))
    return tuple(sorted(found, key=lambda message: message.peer))


def _free(layout: Layout) -> tuple[int, ...]:
    """The mesh dimensions that do not cut the tensor: along them are replicas, or addends."""
    return tuple(m for m, placement in enumerate(layout.placements) if not isinstance(placement, Shard | Ragged))


def _place(layout: Layout, free: tuple[int, ...], rank: int) -> int:
    coordinate = layout.mesh.coordinate(rank)
    place = 0
    for mesh_dim in free:
        place = place * layout.mesh.shape[mesh_dim] + coordinate[mesh_dim]
    return place


def _turn(before: Layout, after: Layout, free: tuple[int, ...], rank: int) -> int:
    """Which of the ranks that hold the same part serves this one."""
    if rank in before.mesh:
        return _place(before, free, rank)
    replicas = int(np.prod([before.mesh.shape[m] for m in free], dtype=np.int64))
    return after.mesh.position(rank) % replicas
