"""Go through tensors of any size a few megabytes at a time."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from math import prod

from torch import Tensor

from shardwright.checkpoint import LazyTensor
from shardwright.layout import Region

__all__ = ["BUDGET", "boxes", "read_blocks", "read_box", "stored_order"]

BUDGET = 16 << 20
"""Bytes of a tensor that are in memory at a time."""


def boxes(region: Region, itemsize: int, budget: int = BUDGET) -> Iterator[Region]:
    """Yield boxes of at most `budget` bytes that make up a region, in row-major order.

    The elements of one box directly follow those of the one before.

    >>> list(boxes(Region.whole((3, 4)), itemsize=1, budget=8))
    [Region[0:2, 0:4], Region[2:3, 0:4]]
    >>> list(boxes(Region((0, 1), (2, 4)), itemsize=1, budget=3))
    [Region[0:1, 1:4], Region[0:1, 4:5], Region[1:2, 1:4], Region[1:2, 4:5]]
    """
    if region.is_empty:
        return
    yield from _split(region.offset, region.size, 0, max(1, budget // itemsize))


def _split(offset: Sequence[int], size: Sequence[int], dim: int, most: int) -> Iterator[Region]:
    if dim == len(size) or prod(size[dim:]) <= most:
        yield Region(offset, size)
        return
    step = max(1, most // prod(size[dim + 1 :]))
    for start in range(0, size[dim], step):
        part = min(step, size[dim] - start)
        below_offset = (*offset[:dim], offset[dim] + start, *offset[dim + 1 :])
        below_size = (*size[:dim], part, *size[dim + 1 :])
        yield from _split(below_offset, below_size, dim + 1 if part == 1 else len(size), most)


def read_box(tensor: LazyTensor[Tensor], box: Region) -> Tensor:
    """Read a box of a tensor."""
    return tensor[tuple(slice(first, end) for first, end in zip(box.offset, box.end, strict=True))]


def read_blocks(tensor: LazyTensor[Tensor], budget: int = BUDGET) -> Iterator[tuple[Region, Tensor]]:
    """Read a tensor in row-major order, box by box."""
    for box in boxes(Region.whole(tensor.shape), tensor.dtype.itemsize, budget):
        yield box, read_box(tensor, box)


def stored_order(tensor: LazyTensor[Tensor], budget: int = BUDGET) -> Iterator[tuple[Region, Tensor]]:
    """Read a tensor box by box, in the order in which its regions are stored: every byte of the files is read once."""
    for region, _ in tensor.holdings():
        for box in boxes(region, tensor.dtype.itemsize, budget):
            yield box, read_box(tensor, box)
