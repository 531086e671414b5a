"""Basic indexing of a stored tensor: the box that covers an index, and how to index that box. Pure.

If a slice has a large step, only the wanted layers along that dimension are read.
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
    """The covering box, the index into it, and the dimensions of the result to flip.

    `steps` are the steps of the slices, one for each dimension of the tensor.
    """

    region: Region
    inside: tuple[Any, ...]
    flipped: tuple[int, ...]
    steps: tuple[int, ...]

    def take(self, box: Tensor) -> Tensor:
        """Index the box and return the result."""
        values = box[self.inside]
        return values.flip(self.flipped) if self.flipped else values

    def by_layers(self, shape: Sequence[int], itemsize: int, least: int) -> tuple[Slicing, int, list[Region]]:
        """Return the slicing for single layers along one dimension, that dimension, and the region of each layer.

        It is the dimension with the largest step, among those where a step skips at least `least` bytes of the tensor.
        If there is none, the slicing is unchanged, and the only region is the covering box.

        >>> slicing_of(slice(None, None, 3), (7, 8)).by_layers((7, 8), itemsize=4, least=64)[1:]
        (0, [Region[0:1, 0:8], Region[3:4, 0:8], Region[6:7, 0:8]])
        """
        offset, size = list(self.region.offset), list(self.region.size)
        candidates = [
            (step, -dim)
            for dim, step in enumerate(self.steps)
            if size[dim] > 1 and step > 1 and step * prod(shape[dim + 1 :]) * itemsize >= least
        ]
        if not candidates or self.region.is_empty:
            return self, 0, [self.region]
        step, dim = max(candidates)[0], -max(candidates)[1]
        layers = [
            Region([*offset[:dim], low, *offset[dim + 1 :]], [*size[:dim], 1, *size[dim + 1 :]])
            for low in range(offset[dim], offset[dim] + size[dim], step)
        ]
        position = [at for at, entry in enumerate(self.inside) if entry is not None][dim]
        inside = (*self.inside[:position], slice(None), *self.inside[position + 1 :])
        return self._replace(inside=inside), dim, layers


def slicing_of(index: Any, shape: Sequence[int]) -> Slicing:
    """Return the slicing of an index of integers, slices, `...` and None into a tensor of this shape.

    >>> slicing_of((2, slice(None, None, -3)), (4, 8))
    Slicing(region=Region[2:3, 1:8], inside=(0, slice(0, 7, 3)), flipped=(0,), steps=(1, 3))
    """
    entries = _expand(index if isinstance(index, tuple) else (index,), len(shape))
    offset: list[int] = []
    size: list[int] = []
    inside: list[Any] = []
    flipped: list[int] = []
    steps: list[int] = []
    result = 0  # the next dimension of the result
    for entry in entries:
        if entry is None:
            inside.append(None)
            result += 1
            continue
        extent = shape[len(offset)]
        if isinstance(entry, slice):
            indices = _range(entry, extent, len(offset))
            low, high = (min(indices[0], indices[-1]), max(indices[0], indices[-1]) + 1) if len(indices) else (0, 0)
            inside.append(slice(0, high - low, abs(indices.step)))
            steps.append(abs(indices.step))
            if indices.step < 0:
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


def _expand(entries: tuple[Any, ...], ndim: int) -> list[Any]:
    """Expand an index to one entry per dimension, plus the Nones."""
    dots = [position for position, entry in enumerate(entries) if entry is Ellipsis]
    if len(dots) > 1:
        raise RegionError("an index can have '...' only once")
    count = sum(entry is not None and entry is not Ellipsis for entry in entries)
    if count > ndim:
        raise RegionError(f"too many indices: got {count} for a tensor of {ndim} dimensions")
    position = dots[0] if dots else len(entries)
    return [*entries[:position], *(slice(None),) * (ndim - count), *entries[position + 1 :]]


def _range(entry: slice, extent: int, dim: int) -> range:
    try:
        return range(extent)[entry]
    except ValueError:
        raise RegionError(f"slice {entry} of dimension {dim}: the step must not be 0; use -1 to reverse") from None
    except TypeError:
        raise ArgumentTypeError(f"slice {entry} of dimension {dim}: bounds and step must be int or None") from None


def _number(entry: Any, extent: int, dim: int) -> int:
    try:
        if isinstance(entry, bool):
            raise TypeError
        number = as_integer(entry)
    except TypeError:
        raise ArgumentTypeError(
            f"a stored tensor takes integers, slices, '...' and None as an index, got {type(entry).__name__}: "
            f"{entry!r}; "
            "read a slice, and index that"
        ) from None
    if not -extent <= number < extent:
        raise RegionError(f"index {number} is out of range for dimension {dim} of size {extent}")
    return number % extent
