"""What the ranks of a host read together, so that no block is read and verified twice. Pure.

A tensor is read by each rank alone where the blocks that the ranks touch are hardly any of them the same: a layout
that was kept, rows cut otherwise. Where ranks touch the same blocks (replicas, columns of what was stored as rows), the
blocks are put in order, cut into segments, and dealt out: each rank reads its segments, and all copy what they want.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

import numpy as np

from shardwright.checkpoint.format.datafile import BLOCK
from shardwright.checkpoint.format.tensors import Integers, Pieces, Placing
from shardwright.checkpoint.plan.find import Finder, Part
from shardwright.layout import Region

__all__ = ["Ask", "Run", "regions_of", "segments", "shared", "touched"]

_WASTE = 1.05  # reading alone may cost this much more than reading once


class Ask(NamedTuple):
    """A stored tensor, by its number, that is loaded under a placing: what every rank knows of every other's wishes."""

    number: int
    placing: Placing


class Run(NamedTuple):
    """Neighbouring blocks of a chunk of the file of `rank`, and where they lie in the segment."""

    rank: int
    chunk: int
    first: int
    blocks: int
    at: int


def regions_of(placing: Placing, rank: int) -> list[Region]:
    """What a rank holds under a placing.

    >>> from shardwright.layout import Layout, Mesh, Shard
    >>> regions_of(Layout(Mesh((2,)), [Shard(0)], (4,)), 1)
    [Region[2:4]]
    """
    if isinstance(placing, Pieces):
        return [placing.regions[number] for number in placing.of_rank(rank)]
    return [placing.region(rank)] if rank in placing.mesh else []


def shared(asks: Sequence[Ask], finder: Finder, ranks: Sequence[int]) -> list[bool]:
    """For each tensor, whether these ranks of one host read it together.

    >>> from shardwright.checkpoint.format.tensors import TensorTable
    >>> from shardwright.layout import Layout, Mesh, Replicate, Shard
    >>> rows, whole = (Layout(Mesh((2,)), [p], (4, 4)) for p in (Shard(0), Replicate()))
    >>> finder = Finder(TensorTable.of(["w"], ["float32"], [4], [rows]))
    >>> shared([Ask(0, rows), Ask(0, whole)], finder, [0, 1])
    [False, True]
    """
    if len(ranks) == 1:
        return [False] * len(asks)
    known: dict[tuple[int, int, int], bool] = {}
    found = []
    for ask in asks:
        table = finder.table
        # Tensors stored alike, and asked for alike, touch blocks alike, but for where shares of replicas are cut.
        key = (int(table.kinds[ask.number]), id(ask.placing), int(table.itemsizes[ask.number]))
        if key not in known:
            known[key] = _overlaps(ask, finder, ranks)
        found.append(known[key])
    return found


def _overlaps(ask: Ask, finder: Finder, ranks: Sequence[int]) -> bool:
    itemsize = int(finder.table.itemsizes[ask.number])
    each = 0
    union: dict[tuple[int, int], list[Integers]] = {}
    for rank in ranks:
        for part in _parts(ask, finder, rank):
            blocks = touched(part, itemsize)
            each += len(blocks)
            union.setdefault((part.rank, part.chunk), []).append(blocks)
    once = sum(len(np.unique(np.concatenate(blocks))) for blocks in union.values())
    return each > _WASTE * once


def _parts(ask: Ask, finder: Finder, rank: int) -> Iterator[Part]:
    for region in regions_of(ask.placing, rank):
        yield from finder.parts(ask.number, region)


def touched(part: Part, itemsize: int) -> Integers:
    """The blocks of a chunk that hold any of a part, in order.

    >>> touched(Part(0, 0, Region((0, 0), (4, 1)), Region((0, 0), (4, 1 << 18))), itemsize=4).tolist()
    [0, 1, 2, 3]
    """
    starts, length = part.region.byte_runs(part.chunk_region, itemsize)
    first, last = starts // BLOCK, (starts + length - 1) // BLOCK
    if len(starts) == 1:
        return np.arange(int(first[0]), int(last[0]) + 1)
    counts = last - first + 1
    before = np.cumsum(counts) - counts
    blocks: Integers = np.unique(np.arange(counts.sum()) + np.repeat(first - before, counts))
    return blocks


def segments(asks: Iterable[Ask], finder: Finder, ranks: Sequence[int], slot: int) -> list[list[Run]]:
    """The blocks that any of these ranks wants of these tensors, each once, in segments of at most `slot` bytes.

    >>> from shardwright.checkpoint.format.tensors import TensorTable
    >>> from shardwright.layout import Layout, Mesh, Replicate
    >>> whole = Layout(Mesh((1,)), [Replicate()], (3 << 18,))
    >>> finder = Finder(TensorTable.of(["w"], ["float32"], [4], [whole]))
    >>> [[(run.first, run.blocks) for run in runs] for runs in segments([Ask(0, whole)], finder, [0], slot=2 << 20)]
    [[(0, 2)], [(2, 1)]]
    """
    wanted: dict[tuple[int, int], list[Integers]] = {}
    for ask in asks:
        itemsize = int(finder.table.itemsizes[ask.number])
        for rank in ranks:
            for part in _parts(ask, finder, rank):
                wanted.setdefault((part.rank, part.chunk), []).append(touched(part, itemsize))
    found: list[list[Run]] = []
    now: list[Run] = []
    used, file = 0, -1
    for (rank, chunk), blocks in sorted(wanted.items()):
        nbytes = int(finder.file(rank).nbytes[chunk])
        if rank != file:
            now, used, file = _close(found, now), 0, rank
        for first, count in _neighbours(np.unique(np.concatenate(blocks))):
            while count:
                room = (slot - used) // BLOCK
                size = min(BLOCK * count, nbytes - first * BLOCK)
                if size > slot - used and room < count:
                    if room == 0:
                        now, used = _close(found, now), 0
                        continue
                    size, take = room * BLOCK, room
                else:
                    take = count
                now.append(Run(rank, chunk, first, take, used))
                used += size
                first, count = first + take, count - take
    _close(found, now)
    return found


def _close(found: list[list[Run]], now: list[Run]) -> list[Run]:
    if now:
        found.append(now)
    return []


def _neighbours(blocks: Integers) -> Iterator[tuple[int, int]]:
    """Stretches of neighbouring numbers: the first, and how many."""
    breaks = np.flatnonzero(np.diff(blocks) != 1) + 1
    for stretch in np.split(blocks, breaks):
        yield int(stretch[0]), len(stretch)
