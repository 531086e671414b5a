"""What the ranks of a host read together, so that no block is read and verified twice. Pure.

A tensor is read by each rank alone where the blocks that the ranks touch are hardly any of them the same: a layout
that was kept, rows cut otherwise. Where ranks touch the same blocks (replicas, columns of what was stored as rows),
they are dealt out among the ranks: see `assignment`.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np

from shardwright.checkpoint.format.data_file import BLOCK
from shardwright.checkpoint.format.locate import ChunkLocator, Part
from shardwright.checkpoint.format.tensor_table import Integers, Pieces, Sharding
from shardwright.layout import Region, RegionTable

__all__ = ["ReadRequest", "Run", "blocks_of", "boxes_meeting", "regions_of", "shared", "touched"]

_WASTE = 1.05  # reading alone may cost this much more than reading once
_LOOKED_AT = 16  # stored boxes of a tensor that this is judged by: those of thousands of ranks are alike


class ReadRequest(NamedTuple):
    """A stored tensor, by its number, that is loaded under a placing: what every rank knows of every other's wishes."""

    number: int
    sharding: Sharding


class Run(NamedTuple):
    """Neighbouring blocks of a chunk of the file of `rank`, and where they lie in the segment."""

    rank: int
    chunk: int
    first: int
    blocks: int
    at: int


def regions_of(sharding: Sharding, rank: int) -> list[Region]:
    """What a rank holds under a placing.

    >>> from shardwright.layout import Layout, Mesh, Shard
    >>> regions_of(Layout(Mesh((2,)), [Shard(0)], (4,)), 1)
    [Region[2:4]]
    """
    if isinstance(sharding, Pieces):
        return [sharding.regions[number] for number in sharding.of_rank(rank)]
    return [sharding.region(rank)] if rank in sharding.mesh else []


def shared(requests: Sequence[ReadRequest], locator: ChunkLocator, ranks: Sequence[int]) -> list[bool]:
    """For each tensor, whether these ranks of one host read it together.

    >>> from shardwright.checkpoint.format.tensor_table import TensorTable
    >>> from shardwright.layout import Layout, Mesh, Replicate, Shard
    >>> rows, whole = (Layout(Mesh((2,)), [p], (4, 4)) for p in (Shard(0), Replicate()))
    >>> locator = ChunkLocator(TensorTable.of(["w"], ["float32"], [4], [rows]))
    >>> shared([ReadRequest(0, rows), ReadRequest(0, whole)], locator, [0, 1])
    [False, True]
    """
    if len(ranks) == 1:
        return [False] * len(requests)
    known: dict[tuple[int, int, int], bool] = {}
    found = []
    for ask in requests:
        table = locator.table
        # Tensors stored alike, and asked for alike, touch blocks alike, but for where shares of replicas are cut.
        key = (int(table.kinds[ask.number]), id(ask.sharding), int(table.itemsizes[ask.number]))
        if key not in known:
            known[key] = _overlaps(ask, locator, ranks)
        found.append(known[key])
    return found


def _overlaps(ask: ReadRequest, locator: ChunkLocator, ranks: Sequence[int]) -> bool:
    """Whether ranks touch blocks that others touch; where replicas share the writing, as if one had written all."""
    itemsize = int(locator.table.itemsizes[ask.number])
    wanted = [region for rank in ranks for region in regions_of(ask.sharding, rank)]
    _, offsets, sizes = boxes_meeting(locator.table.sharding(ask.number), wanted)
    boxes = np.unique(np.concatenate([offsets, sizes], axis=1), axis=0)
    each = once = 0
    for row in boxes[np.unique(np.linspace(0, len(boxes) - 1, _LOOKED_AT).astype(int))] if len(boxes) else ():
        numbers = row.tolist()
        box = Region(numbers[: len(numbers) // 2], numbers[len(numbers) // 2 :])
        blocks = [blocks_of(part, box, itemsize) for region in wanted if (part := region.intersect(box)) is not None]
        each += sum(map(len, blocks))
        once += len(np.unique(np.concatenate(blocks)))
    return each > _WASTE * once


def boxes_meeting(sharding: Sharding, wanted: Iterable[Region]) -> RegionTable:
    """The stored boxes that hold any of the wanted regions, each with a rank that has it.

    >>> from shardwright.layout import Layout, Mesh, Shard
    >>> boxes_meeting(Layout(Mesh((4,)), [Shard(0)], (8,)), [Region((3,), (2,))]).ranks.tolist()
    [1, 2]
    """
    table = _boxes_of(sharding) if isinstance(sharding, Pieces) else sharding.table()
    ends = table.offsets + table.sizes
    meets = np.zeros(len(table.ranks), bool)
    for region in dict.fromkeys(wanted):
        low, high = np.array(region.offset, np.int64), np.array(region.end, np.int64)
        meets |= (np.maximum(table.offsets, low) < np.minimum(ends, high)).all(axis=1)
    return RegionTable(*(column[meets] for column in table))


def _boxes_of(pieces: Pieces) -> RegionTable:
    shape = len(pieces.regions), len(pieces.shape)
    return RegionTable(
        np.array(pieces.ranks, np.int64),
        np.array([region.offset for region in pieces.regions], np.int64).reshape(shape),
        np.array([region.size for region in pieces.regions], np.int64).reshape(shape),
    )


def touched(part: Part, itemsize: int) -> Integers:
    """The blocks of a chunk that hold any of a part, in order.

    >>> touched(Part(0, 0, Region((0, 0), (4, 1)), Region((0, 0), (4, 1 << 18))), itemsize=4).tolist()
    [0, 1, 2, 3]
    """
    return blocks_of(part.region, part.chunk_region, itemsize)


def blocks_of(region: Region, chunk: Region, itemsize: int) -> Integers:
    """The blocks of a chunk that hold any of a region inside it, in order.

    >>> blocks_of(Region((1, 0), (2, 1)), Region((0, 0), (4, 1 << 18)), itemsize=4).tolist()
    [1, 2]
    """
    if not region.is_empty and chunk.volume * itemsize <= BLOCK:
        return np.zeros(1, np.int64)
    starts, length = region.byte_runs(chunk, itemsize)
    if len(starts) and int(np.diff(starts).max(initial=0)) <= BLOCK:  # no block lies between two runs
        return np.arange(int(starts[0]) // BLOCK, (int(starts[-1]) + length - 1) // BLOCK + 1)
    first, last = starts // BLOCK, (starts + length - 1) // BLOCK
    counts = last - first + 1
    before = np.cumsum(counts) - counts
    blocks: Integers = np.unique(np.arange(counts.sum()) + np.repeat(first - before, counts))
    return blocks
