"""Do these regions tile that one exactly?

The idea: give each box +1 or -1 at each of its corners (the sign alternates from corner to corner). Those signed
corners determine the sum of the boxes' indicator functions, as a function is determined by its differences. So the
boxes tile the parent *if and only if* their signed corners add up to the parent's. Sorting the corners costs
n log n in any number of dimensions, where comparing pairs costs n². Where they do not add up, the first corner in
row-major order that is left over is the first point that is held twice (positive) or by nobody (negative).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeAlias, final

import numpy as np
import numpy.typing as npt

from shardwright.errors import RegionError
from shardwright.layout.region import Region, region_unchecked

__all__ = ["Coverage", "Exact", "Gap", "Outside", "Overlap", "coverage", "coverage_of_boxes"]

Integers: TypeAlias = npt.NDArray[np.int64]


@final
@dataclass(frozen=True, slots=True)
class Exact:
    """The regions tile the parent: every element is held once. True in a condition; the others are false.

    >>> Region((0,), (4,)).covers([Region((0,), (1,)), Region((1,), (3,))])
    Exact()
    """

    def __bool__(self) -> bool:
        return True

    def __str__(self) -> str:
        return "exact"


@final
@dataclass(frozen=True, slots=True)
class Gap:
    """No region holds `region`, a box that starts at the first missing element.

    >>> print(Region((0,), (8,)).covers([Region((0,), (2,)), Region((5,), (3,))]))
    gap: nothing holds [2:5] of [0:8]
    """

    region: Region
    parent: Region

    def __bool__(self) -> bool:
        return False

    def __str__(self) -> str:
        return f"gap: nothing holds {self.region} of {self.parent}"


@final
@dataclass(frozen=True, slots=True)
class Overlap:
    """Regions number `first` and `second` both hold `region`.

    >>> print(Region((0,), (8,)).covers([Region((0,), (5,)), Region((4,), (4,))]))
    overlap: region 0 [0:5] and region 1 [4:8] both hold [4:5]
    """

    region: Region
    first: int
    second: int
    regions: tuple[Region, Region]

    def __bool__(self) -> bool:
        return False

    def __str__(self) -> str:
        (a, b), (i, j) = self.regions, (self.first, self.second)
        return f"overlap: region {i} {a} and region {j} {b} both hold {self.region}"


@final
@dataclass(frozen=True, slots=True)
class Outside:
    """Region number `index` reaches outside the parent.

    >>> print(Region((0,), (8,)).covers([Region((0,), (9,))]))
    outside: region 0 [0:9] is not inside [0:8]
    """

    region: Region
    index: int
    parent: Region

    def __bool__(self) -> bool:
        return False

    def __str__(self) -> str:
        return f"outside: region {self.index} {self.region} is not inside {self.parent}"


Coverage: TypeAlias = Exact | Gap | Overlap | Outside


def coverage(parent: Region, regions: Sequence[Region]) -> Coverage:
    """How `regions` cover `parent`: `Exact`, or the first thing that is wrong."""
    for index, region in enumerate(regions):
        if region.ndim != parent.ndim:
            raise RegionError(
                f"region {index} {region} has {region.ndim} dimensions, {parent} has {parent.ndim}: "
                "only regions of one tensor can tile it"
            )
    starts = np.array([r.offset for r in regions], np.int64).reshape(len(regions), parent.ndim)
    return coverage_of_boxes(parent, starts, np.array([r.size for r in regions], np.int64).reshape(starts.shape))


def coverage_of_boxes(parent: Region, starts: Integers, sizes: Integers) -> Coverage:
    """The same, of boxes given as arrays, a row for each."""
    stops = starts + sizes

    def region(index: int) -> Region:
        return Region(starts[index].tolist(), sizes[index].tolist())

    low, high = np.array(parent.offset, np.int64), np.array(parent.end, np.int64)
    stray = np.flatnonzero(((starts < low) | (stops > high)).any(axis=1))
    if stray.size:
        return Outside(region(int(stray[0])), int(stray[0]), parent)
    wrong = _first_mismatch(starts, stops, low, high)
    if wrong is None:
        return Exact()
    point, count = wrong
    held = (starts <= point) & (point < stops)
    if count > 0:
        first, second = (int(i) for i in np.flatnonzero(held.all(axis=1))[:2])
        both = region(first), region(second)
        common = both[0].intersect(both[1])
        assert common is not None  # both hold `point`
        return Overlap(common, first, second, both)
    return Gap(_grow_gap(point, starts, stops, high), parent)


def _first_mismatch(starts: Integers, stops: Integers, low: Integers, high: Integers) -> tuple[Integers, int] | None:
    """The first point, in row-major order, that is not held exactly once, with how often too many it is held."""
    full = (stops > starts).all(axis=1)
    sign = np.ones(int(full.sum()) + 1, np.int64)
    # The parent is taken away, so what is left over is what is wrong. An empty parent has nothing to take.
    sign[-1] = -1 if (high > low).all() else 0
    begin, end = np.vstack([starts[full], low]), np.vstack([stops[full], high])

    # A dimension that every box spans whole says nothing, and would double the corners.
    split = np.flatnonzero((begin != low).any(axis=0) | (end != high).any(axis=0))
    points, signs = begin[:, split], sign
    for column, dim in enumerate(split):
        other = points.copy()
        other[:, column] = np.tile(end[:, dim], 2**column)
        points, signs = np.vstack([points, other]), np.concatenate([signs, -signs])

    order = np.lexsort(points.T[::-1]) if split.size else np.arange(len(points))
    points, signs = points[order], signs[order]
    new = np.flatnonzero(np.concatenate([[True], (points[1:] != points[:-1]).any(axis=1)]))
    left_over = np.add.reduceat(signs, new)
    wrong = np.flatnonzero(left_over)
    if not wrong.size:
        return None
    point = low.copy()
    point[split] = points[new[wrong[0]]]
    return point, int(left_over[wrong[0]])


def _grow_gap(point: Integers, starts: Integers, stops: Integers, high: Integers) -> Region:
    """The box of missing elements that starts at `point`: as long as can be in the last dimension, then the others."""
    end = point + 1
    for dim in reversed(range(len(point))):
        beside = ((starts < end) & (stops > point))[:, np.arange(len(point)) != dim].all(axis=1)
        blocking = starts[beside & (stops[:, dim] > starts[:, dim]) & (starts[:, dim] >= end[dim]), dim]
        end[dim] = min(int(high[dim]), int(blocking.min()) if blocking.size else int(high[dim]))
    return region_unchecked(tuple(point.tolist()), tuple((end - point).tolist()))
