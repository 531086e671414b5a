"""Decide which tensors the ranks of a host read together, so that no block is read and verified twice. Pure.

Each rank reads a tensor alone if the ranks need mostly different blocks: the stored layout, or other rows. If they need
the same blocks (replicas, columns of a tensor that was stored by rows), the blocks are divided among the ranks: see
`ReadAssignment`.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np

from shardwright.checkpoint.format.data_file import BLOCK
from shardwright.checkpoint.format.locate import ChunkLocator, Part
from shardwright.checkpoint.format.tensor_table import Integers, Pieces, Sharding
from shardwright.layout import Region, RegionTable

__all__ = ["ReadRequest", "Run", "blocks_of", "blocks_of_part", "boxes_intersecting", "regions_of", "shared"]

_MAX_OVERHEAD = 1.05  # reading alone may cost this factor more than reading once
_SAMPLED_BOXES = 16  # stored boxes of a tensor to sample: those of thousands of ranks are similar


class ReadRequest(NamedTuple):
    """A request to load a stored tensor, given by its index, under this sharding."""

    number: int
    sharding: Sharding


class Run(NamedTuple):
    """Adjacent blocks of a chunk in the file of `rank`, and their offset in the segment."""

    rank: int
    chunk: int
    first: int
    blocks: int
    at: int


def regions_of(sharding: Sharding, rank: int) -> list[Region]:
    """Return the regions that a rank holds under a sharding.

    >>> from shardwright.layout import Layout, Mesh, Shard
    >>> regions_of(Layout(Mesh((2,)), [Shard(0)], (4,)), 1)
    [Region[2:4]]
    """
    if isinstance(sharding, Pieces):
        return [sharding.regions[number] for number in sharding.of_rank(rank)]
    return [sharding.region(rank)] if rank in sharding.mesh else []


def shared(requests: Sequence[ReadRequest], locator: ChunkLocator, ranks: Sequence[int]) -> list[bool]:
    """Return for each request whether these ranks of one host should read it together.

    >>> from shardwright.checkpoint.format.tensor_table import TensorTable
    >>> from shardwright.layout import Layout, Mesh, Replicate, Shard
    >>> rows, whole = (Layout(Mesh((2,)), [p], (4, 4)) for p in (Shard(0), Replicate()))
    >>> locator = ChunkLocator(TensorTable.of(["w"], ["float32"], [4], [rows]))
    >>> shared([ReadRequest(0, rows), ReadRequest(0, whole)], locator, [0, 1])
    [False, True]
    """
    if len(ranks) == 1:
        return [False] * len(requests)
    cache: dict[tuple[int, int, int], bool] = {}
    is_shared = []
    for request in requests:
        table = locator.table
        # Tensors with equal stored and requested shardings need the same blocks, except where replicas are split.
        key = (int(table.kinds[request.number]), id(request.sharding), int(table.itemsizes[request.number]))
        if key not in cache:
            cache[key] = _overlaps(request, locator, ranks)
        is_shared.append(cache[key])
    return is_shared


def _overlaps(request: ReadRequest, locator: ChunkLocator, ranks: Sequence[int]) -> bool:
    """Return True if ranks need common blocks, counting replicas as if one rank had written all of them."""
    itemsize = int(locator.table.itemsizes[request.number])
    regions = [region for rank in ranks for region in regions_of(request.sharding, rank)]
    _, offsets, sizes = boxes_intersecting(locator.table.sharding(request.number), regions)
    boxes = np.unique(np.concatenate([offsets, sizes], axis=1), axis=0)
    separate = combined = 0
    for row in boxes[np.unique(np.linspace(0, len(boxes) - 1, _SAMPLED_BOXES).astype(int))] if len(boxes) else ():
        bounds = row.tolist()
        box = Region(bounds[: len(bounds) // 2], bounds[len(bounds) // 2 :])
        blocks = [blocks_of(part, box, itemsize) for region in regions if (part := region.intersect(box)) is not None]
        separate += sum(map(len, blocks))
        combined += len(np.unique(np.concatenate(blocks)))
    return separate > _MAX_OVERHEAD * combined


def boxes_intersecting(sharding: Sharding, regions: Iterable[Region]) -> RegionTable:
    """Return the stored boxes that intersect any of the regions, each with a rank that holds it.

    >>> from shardwright.layout import Layout, Mesh, Shard
    >>> boxes_intersecting(Layout(Mesh((4,)), [Shard(0)], (8,)), [Region((3,), (2,))]).ranks.tolist()
    [1, 2]
    """
    table = _boxes_of(sharding) if isinstance(sharding, Pieces) else sharding.table()
    ends = table.offsets + table.sizes
    intersects = np.zeros(len(table.ranks), bool)
    for region in dict.fromkeys(regions):
        low, high = np.array(region.offset, np.int64), np.array(region.end, np.int64)
        intersects |= (np.maximum(table.offsets, low) < np.minimum(ends, high)).all(axis=1)
    return RegionTable(*(column[intersects] for column in table))


def _boxes_of(pieces: Pieces) -> RegionTable:
    shape = len(pieces.regions), len(pieces.shape)
    return RegionTable(
        np.array(pieces.ranks, np.int64),
        np.array([region.offset for region in pieces.regions], np.int64).reshape(shape),
        np.array([region.size for region in pieces.regions], np.int64).reshape(shape),
    )


def blocks_of_part(part: Part, itemsize: int) -> Integers:
    """Return the blocks of a chunk that contain any of a part, in order.

    >>> blocks_of_part(Part(0, 0, Region((0, 0), (4, 1)), Region((0, 0), (4, 1 << 18))), itemsize=4).tolist()
    [0, 1, 2, 3]
    """
    return blocks_of(part.region, part.chunk_region, itemsize)


def blocks_of(region: Region, chunk: Region, itemsize: int) -> Integers:
    """Return the blocks of a chunk that contain any of a region inside it, in order.

    >>> blocks_of(Region((1, 0), (2, 1)), Region((0, 0), (4, 1 << 18)), itemsize=4).tolist()
    [1, 2]
    """
    if not region.is_empty and chunk.volume * itemsize <= BLOCK:
        return np.zeros(1, np.int64)
    starts, length = region.byte_runs(chunk, itemsize)
    if len(starts) and int(np.diff(starts).max(initial=0)) <= BLOCK:  # no block is between two runs
        return np.arange(int(starts[0]) // BLOCK, (int(starts[-1]) + length - 1) // BLOCK + 1)
    first, last = starts // BLOCK, (starts + length - 1) // BLOCK
    counts = last - first + 1
    before = np.cumsum(counts) - counts
    blocks: Integers = np.unique(np.arange(counts.sum()) + np.repeat(first - before, counts))
    return blocks
