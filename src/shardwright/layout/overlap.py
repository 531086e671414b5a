"""Find all pairs of overlapping boxes of two lists: the join behind every transfer plan.

Comparing all pairs costs n·m. Instead the tensor is bisected recursively, where that separates the boxes best, until
few boxes are left on each side; those are compared pairwise. A box that crosses a split is in both halves; a pair is
reported by the half in which its intersection begins.
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

_MAX_PAIRS_AT_ONCE = 1 << 22  # pairs compared in one vectorised step: about 100 MB of arrays
_MAX_PAIRWISE = 1 << 14  # up to this many pairs are compared without splitting further
_MIN_GAIN = 0.9  # a split that leaves more than this fraction of the pairs is not worth it


class Boxes(NamedTuple):
    """Regions as arrays, one row each: for hundreds of thousands of them.

    >>> Boxes.of([Region((0, 2), (4, 3)), Region((4, 0), (1, 5))]).sizes.tolist()
    [[4, 3], [1, 5]]
    """

    offsets: Integers
    sizes: Integers

    @classmethod
    def of(cls, regions: Sequence[Region]) -> Boxes:
        """Return these regions, which have the same number of dimensions, as arrays."""
        ndim = regions[0].ndim if regions else 0
        offsets = np.array([region.offset for region in regions], np.int64).reshape(len(regions), ndim)
        return cls(offsets, np.array([region.size for region in regions], np.int64).reshape(len(regions), ndim))


class Overlaps(NamedTuple):
    """Overlaps as columns. Row k: boxes `first[k]` and `second[k]` share the box of `offsets[k]` and `sizes[k]`.

    >>> found = overlaps(Boxes.of([Region((0,), (4,))]), Boxes.of([Region((0,), (2,)), Region((2,), (9,))]))
    >>> found.second.tolist(), found.offsets.tolist(), found.sizes.tolist()
    ([0, 1], [[0], [2]], [[2], [2]])
    """

    first: Integers
    second: Integers
    offsets: Integers
    sizes: Integers


def overlaps(first: Boxes, second: Boxes) -> Overlaps:
    """Return all pairs of boxes of `first` and `second` that share an element, ordered by index.

    >>> rows, columns = (Boxes.of([Region.whole((4, 2)), Region((0, 2), (4, 2))]), Boxes.of([Region((1, 1), (2, 2))]))
    >>> found = overlaps(rows, columns)
    >>> found.first.tolist(), found.sizes.tolist()
    ([0, 1], [[2, 1], [2, 1]])
    """
    ndim = first.offsets.shape[1]
    if len(first.offsets) and len(second.offsets) and second.offsets.shape[1] != ndim:
        raise RegionError(f"boxes must have the same number of dimensions, got {ndim} and {second.offsets.shape[1]}")
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
    """Return the indices of two overlapping boxes, or None if all are disjoint.

    It stops at the first pair: coinciding boxes would have n² pairs.

    >>> overlapping_pair(Boxes.of([Region((0,), (2,)), Region((4,), (2,)), Region((5,), (2,))]))
    (1, 2)
    >>> overlapping_pair(Boxes.of([Region((0,), (2,)), Region((4,), (2,))])) is None
    True
    """
    side = _Side.of(boxes)
    for first, second in _join(side, side, ((None, None),) * boxes.offsets.shape[1]):
        pairs = np.flatnonzero(first < second)
        if pairs.size:
            return int(first[pairs[0]]), int(second[pairs[0]])
    return None


class _Side(NamedTuple):
    """Some non-empty boxes of one list: their indices, and their starts and stops by dimension."""

    indices: Integers
    starts: tuple[Integers, ...]
    stops: tuple[Integers, ...]

    @classmethod
    def of(cls, boxes: Boxes) -> _Side:
        full = np.flatnonzero((boxes.sizes > 0).all(axis=1))
        starts = boxes.offsets[full].T.copy()
        return cls(full, tuple(starts), tuple(starts + boxes.sizes[full].T))

    @property
    def size(self) -> int:
        return len(self.indices)

    def take(self, mask: npt.NDArray[np.bool_]) -> _Side:
        return _Side(self.indices[mask], tuple(c[mask] for c in self.starts), tuple(c[mask] for c in self.stops))


class _Split(NamedTuple):
    """A split of one dimension in two."""

    dim: int
    at: int

    def halves(self, side: _Side) -> tuple[npt.NDArray[np.bool_], npt.NDArray[np.bool_]]:
        """Return masks of the boxes that reach into the lower and into the upper half."""
        return side.starts[self.dim] < self.at, side.stops[self.dim] > self.at


_Bounds: TypeAlias = tuple[tuple[int | None, int | None], ...]  # by dimension; None if not split


def _join(a: _Side, b: _Side, within: _Bounds) -> Iterator[tuple[Integers, Integers]]:
    """Yield the indices of pairs whose intersection begins within these bounds."""
    split = _best_split(a, b) if a.size * b.size > _MAX_PAIRWISE else None
    if split is None:
        yield from _compare(a, b, within)
        return
    (low_a, high_a), (low_b, high_b) = split.halves(a), split.halves(b)
    low, high = within[split.dim]
    before, after = within[: split.dim], within[split.dim + 1 :]
    yield from _join(a.take(low_a), b.take(low_b), (*before, (low, split.at), *after))
    yield from _join(a.take(high_a), b.take(high_b), (*before, (split.at, high), *after))


def _best_split(a: _Side, b: _Side) -> _Split | None:
    """Return the median split, over all dimensions, that leaves the fewest pairs; None if none is worth it."""
    best, fewest = None, _MIN_GAIN * a.size * b.size
    for dim in range(len(a.starts)):
        starts = np.concatenate([a.starts[dim], b.starts[dim]])
        at = np.partition(starts, len(starts) // 2)[len(starts) // 2]
        if at == starts.min():  # the lower half would be empty
            candidates = starts[starts > at]
            if not candidates.size:
                continue
            at = candidates.min()
        split = _Split(dim, int(at))
        comparisons = sum(int(x.sum()) * int(y.sum()) for x, y in zip(split.halves(a), split.halves(b), strict=True))
        if comparisons < fewest:
            best, fewest = split, comparisons
    return best


def _compare(a: _Side, b: _Side, within: _Bounds) -> Iterator[tuple[Integers, Integers]]:
    """Compare all pairs, a bounded number at a time."""
    rows = max(1, _MAX_PAIRS_AT_ONCE // max(1, b.size))
    for first in range(0, a.size, rows):
        block = slice(first, first + rows)
        overlap = np.ones((len(a.indices[block]), b.size), bool)
        for dim, (low, high) in enumerate(within):
            start = np.maximum(a.starts[dim][block, None], b.starts[dim])
            overlap &= start < np.minimum(a.stops[dim][block, None], b.stops[dim])
            if low is not None:
                overlap &= start >= low
            if high is not None:
                overlap &= start < high
        i, j = overlap.nonzero()
        yield a.indices[block][i], b.indices[j]
