"""Cutting a move into rounds, so that what is packed and unpacked on the way fits a bounded buffer. Pure."""

from __future__ import annotations

from functools import lru_cache

from shardwright.layout import Layout, Region

__all__ = ["cut", "largest_shard"]


@lru_cache(maxsize=4096)
def largest_shard(layout: Layout) -> int:
    """An upper bound on the elements of any rank's shard, and the largest shard where no dimension is cut twice.

    >>> from shardwright.layout import Mesh, Shard
    >>> largest_shard(Layout(Mesh((4,)), [Shard(0)], (5, 3)))
    6
    """
    volume = 1
    sizes = layout.table().sizes
    for dim in range(layout.ndim):
        volume *= int(sizes[:, dim].max())
    return volume


@lru_cache(maxsize=16384)
def cut(box: Region, count: int) -> tuple[Region, ...]:
    """Boxes that tile `box`, none larger than a `count`-th of it (or one element), along leading dimensions first.

    >>> cut(Region((0, 0), (4, 2)), 2)
    (Region[0:1, 0:2], Region[1:2, 0:2], Region[2:3, 0:2], Region[3:4, 0:2])
    >>> cut(Region((0, 0), (4, 2)), 1)
    (Region[0:4, 0:2],)
    """
    if count == 1 or box.is_empty:
        return (box,)
    # Rounding up makes a part at most twice its fair share: with twice as many parts, it keeps within the share.
    return tuple(_cut(box, 2 * count, 0))


def _cut(box: Region, count: int, dim: int) -> list[Region]:
    if count <= 1 or dim == box.ndim:
        return [box]
    extent = box.size[dim]
    step = -(-extent // count)
    parts = []
    for start in range(0, extent, step):
        offset = (*box.offset[:dim], box.offset[dim] + start, *box.offset[dim + 1 :])
        size = (*box.size[:dim], min(step, extent - start), *box.size[dim + 1 :])
        parts += _cut(Region(offset, size), -(-count // extent), dim + 1)
    return parts
