"""Split a transfer into rounds, so that the scratch memory for packing and unpacking stays bounded."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from typing import TypeVar

from shardwright.layout import Region

__all__ = ["in_rounds", "split_region"]

T = TypeVar("T")


@lru_cache(maxsize=16384)
def split_region(box: Region, count: int) -> tuple[Region, ...]:
    """Boxes that tile `box`, none larger than 1/count of it (or one element), split along leading dimensions first.

    >>> split_region(Region((0, 0), (4, 2)), 2)
    (Region[0:1, 0:2], Region[1:2, 0:2], Region[2:3, 0:2], Region[3:4, 0:2])
    >>> split_region(Region((0, 0), (4, 2)), 1)
    (Region[0:4, 0:2],)
    """
    if count == 1 or box.is_empty:
        return (box,)
    # Rounding up makes a part at most twice its fair share: with twice as many parts, it stays within the share.
    return tuple(_split(box, 2 * count, 0))


def _split(box: Region, count: int, dim: int) -> list[Region]:
    if count <= 1 or dim == box.ndim:
        return [box]
    extent = box.size[dim]
    step = -(-extent // count)
    parts = []
    for start in range(0, extent, step):
        offset = (*box.offset[:dim], box.offset[dim] + start, *box.offset[dim + 1 :])
        size = (*box.size[:dim], min(step, extent - start), *box.size[dim + 1 :])
        parts += _split(Region(offset, size), -(-count // extent), dim + 1)
    return parts


def in_rounds(count: int, begin: Callable[[int], Callable[[], None]], result: T) -> Callable[[], T]:
    """Run the rounds one after the other, but leave the last one in flight.

    `begin(number)` starts a round and returns the function that finishes it. The function returned here finishes the
    last round and returns `result`.

    >>> in_rounds(2, lambda number: lambda: None, "filled")()
    'filled'
    """
    for number in range(count - 1):
        begin(number)()
    last = begin(count - 1) if count else None

    def finish() -> T:
        if last is not None:
            last()
        return result

    return finish
