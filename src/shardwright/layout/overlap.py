"""Which boxes of one list meet which boxes of another, and where: the join under every plan of moves.

Comparing all pairs costs n·m. Here the tensor is halved where that parts the boxes best, again and again, until few
boxes are left on either side; those are compared whole. A box that crosses a cut goes on in both halves, and a pair
is counted in the one half in which what it shares begins.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt

from shardwright.errors import RegionError
from shardwright.layout.region import Region

__all__ = ["Boxes", "Overlaps", "overlapping_pair", "overlaps"]

Integers: TypeAlias = npt.NDArray[np.int64]

_AT_ONCE = 1 << 22  # pairs compared in one go: some 100 MB of arrays
_FEW = 1 << 14  # no more pairs than this are compared whole
_GAIN = 0.9  # a cut that leaves more than this part of the pairs to compare is not worth it


class Boxes(NamedTuple):
    """Regions as arrays, a row for each: for hundreds of thousands of them.

    >>> Boxes.of([Region((0, 2), (4, 3)), Region((4, 0), (1, 5))]).sizes.tolist()
    [[4, 3], [1, 5]]
    """

    offsets: Integers
    sizes: Integers

    @classmethod
    def of(cls, regions: Sequence[Region]) -> Boxes:
        """The boxes of these regions, which all have as many dimensions."""
        ndim = regions[0].ndim if regions else 0
        offsets = np.array([region.offset for region in regions], np.int64).reshape(len(regions), ndim)
        return cls(offsets, np.array([region.size for region in regions], np.int64).reshape(len(regions), ndim))


class Overlaps(NamedTuple):
    """Row k says: box `first[k]` and box `second[k]` share the box of `offsets[k]` and `sizes[k]`, which is not empty.

    >>> found = overlaps(Boxes.of([Region((0,), (4,))]), Boxes.of([Region((0,), (2,)), Region((2,), (9,))]))
    >>> found.second.tolist(), found.offsets.tolist(), found.sizes.tolist()
    ([0, 1], [[0], [2]], [[2], [2]])
    """

    first: Integers
    second: Integers
    offsets: Integers
    sizes: Integers


def overlaps(first: Boxes, second: Boxes) -> Overlaps:
    """All pairs of a box of `first` and a box of `second` that share an element, ordered by the two numbers.

    >>> rows, columns = (Boxes.of([Region.whole((4, 2)), Region((0, 2), (4, 2))]), Boxes.of([Region((1, 1), (2, 2))]))
    >>> found = overlaps(rows, columns)
    >>> found.first.tolist(), found.sizes.tolist()
    ([0, 1], [[2, 1], [2, 1]])
    """
    ndim = first.offsets.shape[1]
    if len(first.offsets) and len(second.offsets) and second.offsets.shape[1] != ndim:
        raise RegionError(
            f"boxes of {ndim} and of {second.offsets.shape[1]} dimensions: only regions of one tensor can overlap"
        )
    a, b = _Side.of(first), _Side.of(second)
    if not (a.size and b.size):
        nothing = np.empty(0, np.int64)
        return Overlaps(nothing, nothing, np.empty((0, ndim), np.int64), np.empty((0, ndim), np.int64))
    i, j = (np.concatenate(side) for side in zip(*_join(a, b, ((None, None),) * ndim), strict=True))
    order = np.lexsort((j, i))
    i, j = i[order], j[order]
    start = np.maximum(first.offsets[i], second.offsets[j])
    stop = np.minimum(first.offsets[i] + first.sizes[i], second.offsets[j] + second.sizes[j])
    return Overlaps(i, j, start, stop - start)


def overlapping_pair(boxes: Boxes) -> tuple[int, int] | None:
    """Two of these boxes that share an element, the first pair that is met; None where no two do.

    Of boxes that lie on top of each other there are n² pairs: it stops at one of them.

    >>> overlapping_pair(Boxes.of([Region((0,), (2,)), Region((4,), (2,)), Region((5,), (2,))]))
    (1, 2)
    >>> overlapping_pair(Boxes.of([Region((0,), (2,)), Region((4,), (2,))])) is None
    True
    """
    side = _Side.of(boxes)
    for first, second in _join(side, side, ((None, None),) * boxes.offsets.shape[1]):
        apart = np.flatnonzero(first < second)
        if apart.size:
            return int(first[apart[0]]), int(second[apart[0]])
    return None


class _Side(NamedTuple):
    """Some boxes of one list, none of them empty: their numbers in it, and by dimension where they start and stop."""

    numbers: Integers
    starts: tuple[Integers, ...]
    stops: tuple[Integers, ...]

    @classmethod
    def of(cls, boxes: Boxes) -> _Side:
        full = np.flatnonzero((boxes.sizes > 0).all(axis=1))
        starts = boxes.offsets[full].T.copy()
        return cls(full, tuple(starts), tuple(starts + boxes.sizes[full].T))

    @property
    def size(self) -> int:
        return len(self.numbers)

    def take(self, some: npt.NDArray[np.bool_]) -> _Side:
        return _Side(self.numbers[some], tuple(c[some] for c in self.starts), tuple(c[some] for c in self.stops))


class _Cut(NamedTuple):
    """Where a dimension is cut in two."""

    dim: int
    at: int

    def halves(self, side: _Side) -> tuple[npt.NDArray[np.bool_], npt.NDArray[np.bool_]]:
        """Which boxes reach into the lower half, and which into the upper one."""
        return side.starts[self.dim] < self.at, side.stops[self.dim] > self.at


_Bounds: TypeAlias = tuple[tuple[int | None, int | None], ...]  # by dimension; None where no cut was made


def _join(a: _Side, b: _Side, within: _Bounds) -> Iterator[tuple[Integers, Integers]]:
    """Numbers of the pairs that share something which begins within these bounds."""
    cut = _best_cut(a, b) if a.size * b.size > _FEW else None
    if cut is None:
        yield from _compare(a, b, within)
        return
    (low_a, high_a), (low_b, high_b) = cut.halves(a), cut.halves(b)
    low, high = within[cut.dim]
    before, after = within[: cut.dim], within[cut.dim + 1 :]
    yield from _join(a.take(low_a), b.take(low_b), (*before, (low, cut.at), *after))
    yield from _join(a.take(high_a), b.take(high_b), (*before, (cut.at, high), *after))


def _best_cut(a: _Side, b: _Side) -> _Cut | None:
    """Of the cuts halfway through the boxes, one for each dimension, the one that leaves the fewest pairs."""
    best, fewest = None, _GAIN * a.size * b.size
    for dim in range(len(a.starts)):
        starts = np.concatenate([a.starts[dim], b.starts[dim]])
        at = np.partition(starts, len(starts) // 2)[len(starts) // 2]
        if at == starts.min():  # nothing would be below it
            later = starts[starts > at]
            if not later.size:
                continue
            at = later.min()
        cut = _Cut(dim, int(at))
        left = sum(int(x.sum()) * int(y.sum()) for x, y in zip(cut.halves(a), cut.halves(b), strict=True))
        if left < fewest:
            best, fewest = cut, left
    return best


def _compare(a: _Side, b: _Side, within: _Bounds) -> Iterator[tuple[Integers, Integers]]:
    """All pairs, a bounded number at a time."""
    rows = max(1, _AT_ONCE // max(1, b.size))
    for first in range(0, a.size, rows):
        some = slice(first, first + rows)
        meets = np.ones((len(a.numbers[some]), b.size), bool)
        for dim, (low, high) in enumerate(within):
            start = np.maximum(a.starts[dim][some, None], b.starts[dim])
            meets &= start < np.minimum(a.stops[dim][some, None], b.stops[dim])
            if low is not None:
                meets &= start >= low
            if high is not None:
                meets &= start < high
        i, j = meets.nonzero()
        yield a.numbers[some][i], b.numbers[j]
