"""What an index wants of a tensor: the box that covers it, and how to take it out of that box. Pure.

Where a step leaves out much, the box is thin along that dimension: only the layers that are wanted are read.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from operator import index as as_integer
from typing import Any, NamedTuple

from torch import Tensor

from shardwright.errors import ArgumentTypeError, RegionError
from shardwright.layout import Region

__all__ = ["Slicing", "slicing_of"]


class Slicing(NamedTuple):
    """The covering box, what to index it with, and which dimensions of the result are to be turned round.

    `steps` are those of the slices, one for each dimension of the tensor.
    """

    region: Region
    inside: tuple[Any, ...]
    flipped: tuple[int, ...]
    steps: tuple[int, ...]

    def take(self, box: Tensor) -> Tensor:
        """What was asked for, out of the box."""
        found = box[self.inside]
        return found.flip(self.flipped) if self.flipped else found

    def thinned(self, shape: Sequence[int], itemsize: int, least: int) -> tuple[Slicing, int, list[Region]]:
        """The same, for a box of the wanted layers of one dimension only; which one, and the region of each layer.

        It is the dimension with the widest step, of those where a step passes over `least` bytes of the tensor. Where
        there is none, nothing changes, and the region is the whole box.

        >>> slicing_of(slice(None, None, 3), (7, 8)).thinned((7, 8), itemsize=4, least=64)[1:]
        (0, [Region[0:1, 0:8], Region[3:4, 0:8], Region[6:7, 0:8]])
        """
        offset, size = list(self.region.offset), list(self.region.size)
        wide = [
            (step, -dim)
            for dim, step in enumerate(self.steps)
            if size[dim] > 1 and step > 1 and step * prod(shape[dim + 1 :]) * itemsize >= least
        ]
        if not wide or self.region.is_empty:
            return self, 0, [self.region]
        step, dim = max(wide)[0], -max(wide)[1]
        layers = [
            Region([*offset[:dim], low, *offset[dim + 1 :]], [*size[:dim], 1, *size[dim + 1 :]])
            for low in range(offset[dim], offset[dim] + size[dim], step)
        ]
        place = [at for at, entry in enumerate(self.inside) if entry is not None][dim]
        inside = (*self.inside[:place], slice(None), *self.inside[place + 1 :])
        return self._replace(inside=inside), dim, layers


def slicing_of(index: Any, shape: Sequence[int]) -> Slicing:
    """What an index of numbers, slices, `...` and None wants of a tensor of this shape.

    >>> slicing_of((2, slice(None, None, -3)), (4, 8))
    Slicing(region=Region[2:3, 1:8], inside=(0, slice(0, 7, 3)), flipped=(0,), steps=(1, 3))
    """
    entries = _filled(index if isinstance(index, tuple) else (index,), len(shape))
    offset: list[int] = []
    size: list[int] = []
    inside: list[Any] = []
    flipped: list[int] = []
    steps: list[int] = []
    result = 0  # the dimension of the result that comes next
    for entry in entries:
        if entry is None:
            inside.append(None)
            result += 1
            continue
        extent = shape[len(offset)]
        if isinstance(entry, slice):
            wanted = _range(entry, extent, len(offset))
            low, high = (min(wanted[0], wanted[-1]), max(wanted[0], wanted[-1]) + 1) if len(wanted) else (0, 0)
            inside.append(slice(0, high - low, abs(wanted.step)))
            steps.append(abs(wanted.step))
            if wanted.step < 0:
                flipped.append(result)
            result += 1
        else:
            low = _number(entry, extent, len(offset))
            high = low + 1
            inside.append(0)
            steps.append(1)
        offset.append(low)
        size.append(high - low)
    return Slicing(Region(offset, size), tuple(inside), tuple(flipped), tuple(steps))


def _filled(entries: tuple[Any, ...], ndim: int) -> list[Any]:
    """One entry for every dimension, and the Nones."""
    dots = [place for place, entry in enumerate(entries) if entry is Ellipsis]
    if len(dots) > 1:
        raise RegionError("an index has '...' twice: once is enough")
    given = sum(entry is not None and entry is not Ellipsis for entry in entries)
    if given > ndim:
        raise RegionError(f"{given} indices for a tensor of {ndim} dimensions")
    place = dots[0] if dots else len(entries)
    return [*entries[:place], *(slice(None),) * (ndim - given), *entries[place + 1 :]]


def _range(entry: slice, extent: int, dim: int) -> range:
    try:
        return range(extent)[entry]
    except ValueError:
        raise RegionError(
            f"slice {entry} of dimension {dim}: its step is 0; 1 takes all, -1 turns them round"
        ) from None
    except TypeError:
        raise ArgumentTypeError(f"slice {entry} of dimension {dim}: whole numbers and None make a slice") from None


def _number(entry: Any, extent: int, dim: int) -> int:
    try:
        if isinstance(entry, bool):
            raise TypeError
        number = as_integer(entry)
    except TypeError:
        raise ArgumentTypeError(
            f"index {entry!r} is a {type(entry).__name__}: a stored tensor takes numbers, slices, '...' and None; "
            "read a slice, and index that"
        ) from None
    if not -extent <= number < extent:
        raise RegionError(f"index {number} is outside dimension {dim} of {extent}")
    return number % extent
