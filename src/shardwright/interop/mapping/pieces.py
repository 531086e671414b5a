"""The pieces of a region: boxes of elementary axes, and where each lies in its source and in its target. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import prod
from typing import NamedTuple, TypeAlias, final

from torch import Tensor

from shardwright.layout import Region

__all__ = ["IndexAxis", "IndexBox", "MappedPiece", "Padding", "StridedBox", "index_boxes", "merged_axes"]

IndexBox: TypeAlias = dict[str, tuple[int, int]]
"""A box of elementary axes: the first index along each, and one past the last."""


@final
@dataclass(frozen=True, slots=True)
class StridedBox:
    """Elements of a tensor, as a box over elementary axes: `sizes` along them, each a `(dimension, step)` of `steps`.

    `region` is the smallest region that holds them all.

    >>> box = StridedBox(Region((1, 0), (5, 8)), sizes=(3, 8), steps=((0, 2), (1, 1)))
    >>> box.is_dense, box.volume
    (False, 24)
    """

    region: Region
    sizes: tuple[int, ...]
    steps: tuple[tuple[int, int], ...]

    @property
    def volume(self) -> int:
        """The number of elements."""
        return prod(self.sizes)

    @property
    def is_dense(self) -> bool:
        """True if its region has no other elements."""
        return self.region.volume == self.volume

    def view(self, tensor: Tensor, frame: Region | None = None) -> Tensor:
        """Return a view of these elements, one dimension per axis, in a tensor that holds the region `frame`.

        >>> import torch
        >>> box = StridedBox(Region((1,), (5,)), sizes=(3,), steps=((0, 2),))
        >>> box.view(torch.arange(8))
        tensor([1, 3, 5])
        """
        offset = (self.region if frame is None else self.region.within(frame)).offset
        strides = tensor.stride()
        start = tensor.storage_offset() + sum(at * stride for at, stride in zip(offset, strides, strict=True))
        return tensor.as_strided(self.sizes, [strides[dim] * step for dim, step in self.steps], start)

    def __str__(self) -> str:
        """Return the region in slice notation, and how it is read unless axis by axis."""
        plain = len(self.steps) == sum(size > 1 for size in self.region.size)
        if plain and [dim for dim, _ in self.steps] == sorted(dim for dim, _ in self.steps) and self.is_dense:
            return str(self.region)
        axes = " ".join(f"{size}@{dim}/{step}" for size, (dim, step) in zip(self.sizes, self.steps, strict=True))
        return f"{self.region}({axes})"


@final
@dataclass(frozen=True, slots=True)
class MappedPiece:
    """Elements of the tensor `name` and where they go: the elements of `source` in order become those of `target`.

    >>> import shardwright as sw
    >>> mapping = sw.Mapping("q = wq : (h two r) e = (h r two) e", two=2, r=4)
    >>> for piece in mapping.bind({"q": (16, 3)}).pieces("wq", sw.Region((8, 0), (8, 3))):
    ...     print(piece)
    q[8:16, 0:3](4@0/1 2@0/4 3@1/1) -> [8:16, 0:3](4@0/2 2@0/1 3@1/1)
    """

    name: str
    source: StridedBox
    target: StridedBox

    def copy(
        self, source: Tensor, target: Tensor, source_frame: Region | None = None, frame: Region | None = None
    ) -> None:
        """Copy the elements between tensors that hold these regions of the source and the target; by default, all."""
        self.target.view(target, frame).copy_(self.source.view(source, source_frame))

    def target_as_source(self, target: Tensor, frame: Region | None = None) -> Tensor | None:
        """Return the view of a target that has the shape of the source region; None if there is no such view.

        >>> import shardwright as sw, torch
        >>> [piece] = sw.Mapping("w = v : a b = b a").bind({"w": (2, 3)}).pieces("v")
        >>> piece.target_as_source(torch.arange(6).view(3, 2))
        tensor([[0, 2, 4], [1, 3, 5]])
        """
        dims = [dim for dim, _ in self.source.steps]
        if not self.source.is_dense or len(set(dims)) < len(dims):
            return None
        view = self.target.view(target, frame)
        strides = dict(zip(dims, view.stride(), strict=True))
        size = self.source.region.size
        return view.as_strided(size, [strides.get(dim, 0) for dim in range(len(size))], view.storage_offset())

    def dense(self, least: int = 1) -> Iterator[MappedPiece]:
        """Split the piece, so that source regions hold no other elements, unless they became smaller than `least`."""
        axis = _outermost_gap(self.source)
        if axis is None:
            yield self
            return
        parts = [self._at(axis, index) for index in range(self.source.sizes[axis])]
        if parts[0].source.region.volume < least:
            yield self
            return
        for part in parts:
            yield from part.dense(least)

    def separated(self, least: int = 1) -> Iterator[MappedPiece]:
        """Split the piece, so that `target_as_source` has views, unless source regions became smaller than `least`."""
        dims = [dim for dim, _ in self.source.steps]
        crowded = [axis for axis, dim in enumerate(dims) if dims.count(dim) > 1]
        axis = min(crowded, key=lambda each: _nesting(self.source, each), default=None)
        if axis is None or self._at(axis, 0).source.region.volume < least:
            yield self
            return
        for index in range(self.source.sizes[axis]):
            yield from self._at(axis, index).separated(least)

    def limited(self, limit: int) -> Iterator[MappedPiece]:
        """Split the piece along its outermost axes, so that no source region has more than `limit` elements."""
        if self.source.region.volume <= limit or not self.source.sizes:
            yield self
            return
        axis = min(range(len(self.source.sizes)), key=lambda each: _nesting(self.source, each))
        inner = self._at(axis, 0).source.region.volume
        size = self.source.sizes[axis]
        count = max(1, min(size, limit * size // max(1, self.source.region.volume))) if inner <= limit else 1
        for start in range(0, size, count):
            yield from self._part(axis, start, min(start + count, size)).limited(limit)

    def _at(self, axis: int, index: int) -> MappedPiece:
        return self._part(axis, index, index + 1)

    def _part(self, axis: int, start: int, stop: int) -> MappedPiece:
        return MappedPiece(self.name, _part(self.source, axis, start, stop), _part(self.target, axis, start, stop))

    def __str__(self) -> str:
        return f"{self.name}{self.source} -> {self.target}"


@final
@dataclass(frozen=True, slots=True)
class Padding:
    """Elements of a target that have no source: they are zero.

    >>> import shardwright as sw
    >>> bound = sw.Mapping("w = p : v e = (v + pad) e", pad=2).bind({"w": (6, 4)})
    >>> for piece in bound.pieces("p", sw.Region((4, 0), (4, 4))):
    ...     print(piece)
    w[4:6, 0:4] -> [4:6, 0:4]
    0 -> [6:8, 0:4]
    """

    target: StridedBox

    def fill(self, target: Tensor, frame: Region | None = None) -> None:
        """Set these elements to zero in a tensor that holds the region `frame` of the target."""
        self.target.view(target, frame).zero_()

    def __str__(self) -> str:
        return f"0 -> {self.target}"


class IndexAxis(NamedTuple):
    """An elementary axis within one dimension of a tensor."""

    name: str
    size: int
    step: int


def index_boxes(axes: Sequence[IndexAxis], low: int, high: int) -> Iterator[IndexBox]:
    """Yield the boxes of indices whose sum of steps is in `low:high`, in ascending order: at most two per axis and one.

    The axes are nested: a step of one is at least as long as all steps of those after it.

    >>> list(index_boxes([IndexAxis("h", 4, 10), IndexAxis("d", 10, 1)], 5, 30))
    [{'h': (0, 1), 'd': (5, 10)}, {'h': (1, 3), 'd': (0, 10)}]
    """
    if not axes:
        if low <= 0 < high:
            yield {}
        return
    (name, size, step), inner = axes[0], axes[1:]
    span = 1 + sum(axis.step * (axis.size - 1) for axis in inner)
    first, last = max(0, (low - span) // step + 1), min(size, (high - 1) // step + 1)
    full_first, full_last = max(first, -(-low // step)), min(last, (high - span) // step + 1)
    if full_first >= full_last:
        full_first = full_last = last
    for index in range(first, full_first):
        for box in index_boxes(inner, low - index * step, high - index * step):
            yield {name: (index, index + 1), **box}
    if full_first < full_last:
        yield {name: (full_first, full_last), **{axis.name: (0, axis.size) for axis in inner}}
    for index in range(full_last, last):
        for box in index_boxes(inner, low - index * step, high - index * step):
            yield {name: (index, index + 1), **box}


def merged_axes(
    sizes: Sequence[int], steps: Sequence[Sequence[tuple[int, int]]]
) -> tuple[tuple[int, ...], list[tuple[tuple[int, int], ...]]]:
    """Join adjacent axes that are one axis on every side, and leave out those of length 1; `steps` has them by side.

    >>> merged_axes((2, 1, 3), [[(0, 3), (1, 1), (0, 1)], [(1, 6), (1, 6), (1, 2)]])
    ((6,), [((0, 1),), ((1, 2),)])
    """
    kept: list[int] = []
    sides: list[list[tuple[int, int]]] = [[] for _ in steps]
    for axis, size in enumerate(sizes):
        if size == 1:
            continue
        here = [side[axis] for side in steps]
        if kept and all(
            side[-1] == (dim, step * size) for side, (dim, step) in zip(sides, here, strict=True)
        ):  # one step of the axis before is all of this axis
            kept[-1] *= size
            for side, each in zip(sides, here, strict=True):
                side[-1] = each
        else:
            kept.append(size)
            for side, each in zip(sides, here, strict=True):
                side.append(each)
    return tuple(kept), [tuple(side) for side in sides]


def _nesting(box: StridedBox, axis: int) -> tuple[int, int]:
    dim, step = box.steps[axis]
    return dim, -step


def _outermost_gap(box: StridedBox) -> int | None:
    """Return the outermost axis between whose steps the region has elements that are not in the box, if any."""
    for axis in sorted(range(len(box.sizes)), key=lambda each: _nesting(box, each)):
        dim, step = box.steps[axis]
        inner = [
            (size, steps[1])
            for size, steps in zip(box.sizes, box.steps, strict=True)
            if steps[0] == dim and steps[1] < step
        ]
        if step > 1 + sum(inner_step * (size - 1) for size, inner_step in inner):
            return axis
    return None


def _part(box: StridedBox, axis: int, start: int, stop: int) -> StridedBox:
    """Return the box of the indices `start:stop` along one axis; the axis is left out if that is a single index."""
    dim, step = box.steps[axis]
    offset, size = list(box.region.offset), list(box.region.size)
    offset[dim] += start * step
    size[dim] -= (box.sizes[axis] - (stop - start)) * step
    keep = [stop - start] if stop - start != 1 else []
    return StridedBox(
        Region(offset, size),
        (*box.sizes[:axis], *keep, *box.sizes[axis + 1 :]),
        (*box.steps[:axis], *([box.steps[axis]] if keep else []), *box.steps[axis + 1 :]),
    )
