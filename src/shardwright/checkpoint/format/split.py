"""Split a region into flat ranges of elements, and ranges into boxes. Pure."""

from __future__ import annotations

from math import prod

from shardwright.layout import Region

__all__ = ["boxes_of_range", "granularity"]


def boxes_of_range(region: Region, first: int, last: int) -> list[Region]:
    """Return the boxes that hold elements `first` to `last` (exclusive) of a region, in row-major order.

    There are at most 2 * ndim - 1 of them.

    >>> boxes_of_range(Region((0, 0), (3, 4)), 2, 9)
    [Region[0:1, 2:4], Region[1:2, 0:4], Region[2:3, 0:1]]
    >>> boxes_of_range(Region((4, 0), (3, 4)), 4, 12)
    [Region[5:7, 0:4]]
    """
    return _boxes(region.offset, region.size, first, last)


def _boxes(offset: tuple[int, ...], size: tuple[int, ...], first: int, last: int) -> list[Region]:
    if first >= last:
        return []
    if not size:
        return [Region((), ())]
    row = prod(size[1:])
    if row == 1 or (first % row == 0 and last % row == 0):
        low, high = first // row, last // row
        return [Region((offset[0] + low, *offset[1:]), (high - low, *size[1:]))]
    boxes: list[Region] = []
    head, tail = first // row, last // row
    if head == tail:
        return _within(offset, size, head, first - head * row, last - head * row)
    if first % row:
        boxes += _within(offset, size, head, first - head * row, row)
        head += 1
    if tail > head:
        boxes.append(Region((offset[0] + head, *offset[1:]), (tail - head, *size[1:])))
    if last % row:
        boxes += _within(offset, size, tail, 0, last - tail * row)
    return boxes


def _within(offset: tuple[int, ...], size: tuple[int, ...], row: int, first: int, last: int) -> list[Region]:
    return [Region((offset[0] + row, *box.offset), (1, *box.size)) for box in _boxes(offset[1:], size[1:], first, last)]


def granularity(size: tuple[int, ...], itemsize: int, share: int) -> int:
    """Return the number of elements at whose multiples a region may be split, given a target of `share` bytes per rank.

    Whole rows, of as many dimensions as keep the rounding within 1/64 of the share (or 4 KiB).

    >>> granularity((100, 8, 16), itemsize=4, share=1 << 20)
    128
    """
    limit = max(4096, share // 64) // itemsize
    row = prod(size)
    for extent in size:
        if row <= limit:
            break
        row //= max(1, extent)
    return row if row > 1 else max(1, min(limit, 1024))
