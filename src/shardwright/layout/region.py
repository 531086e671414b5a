"""`Region`: an axis-aligned box of a tensor; and `Coverage`: whether regions tile another one."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any, NamedTuple, TypeAlias, final

import numpy as np
import numpy.typing as npt

from shardwright.errors import RegionError
from shardwright.layout.integers import integers
from shardwright.layout.tiling import Integers, first_mismatch, gap_end

__all__ = [
    "ByteRuns",
    "Coverage",
    "Exact",
    "Gap",
    "Outside",
    "Overlap",
    "Region",
    "coverage",
    "coverage_of_boxes",
    "region_unchecked",
]


class ByteRuns(NamedTuple):
    """The byte ranges of a region in a row-major buffer: `starts` (ascending), each `length` bytes long.

    >>> starts, length = Region((1, 0), (2, 3)).byte_runs((4, 6), itemsize=4)
    >>> [(start, start + length) for start in starts.tolist()]
    [(24, 36), (48, 60)]
    """

    starts: npt.NDArray[np.int64]
    length: int


@final
class Region:
    """A box of a tensor: its offset and size in every dimension.

    Frozen, hashable and picklable. Printed in slice notation.

    >>> box = Region((0, 2), (4, 3))
    >>> box
    Region[0:4, 2:5]
    >>> box.volume, box.end
    (12, (4, 5))
    >>> box.intersect(Region((2, 0), (4, 4)))
    Region[2:4, 2:4]
    """

    __slots__ = ("offset", "size")

    offset: tuple[int, ...]
    size: tuple[int, ...]

    def __init__(self, offset: Iterable[int], size: Iterable[int]) -> None:
        offset, size = integers(offset, "Region offset"), integers(size, "Region size")
        if len(offset) != len(size):
            raise RegionError(f"Region offset and size must have the same length, got {offset} and {size}")
        for attribute, values in (("offset", offset), ("size", size)):
            for dim, value in enumerate(values):
                if value < 0:
                    raise RegionError(f"Region {attribute} must not be negative, got {values} (dimension {dim})")
        _set(self, "offset", offset)
        _set(self, "size", size)

    @classmethod
    def whole(cls, shape: Iterable[int]) -> Region:
        """Return the region of a full tensor of this shape.

        >>> Region.whole((4, 6))
        Region[0:4, 0:6]
        """
        shape = integers(shape, "shape")
        return cls((0,) * len(shape), shape)

    @property
    def ndim(self) -> int:
        """The number of dimensions."""
        return len(self.size)

    @property
    def end(self) -> tuple[int, ...]:
        """One past the last index in every dimension."""
        return tuple(o + s for o, s in zip(self.offset, self.size, strict=True))

    @property
    def volume(self) -> int:
        """The number of elements; 1 for a region without dimensions (a scalar).

        >>> Region((), ()).volume, Region((3, 0), (5, 0)).volume
        (1, 0)
        """
        return prod(self.size)

    @property
    def is_empty(self) -> bool:
        """True if it has no elements."""
        return 0 in self.size

    def intersect(self, other: Region) -> Region | None:
        """Return the intersection, or None if it is empty.

        >>> Region((0,), (4,)).intersect(Region((3,), (4,)))
        Region[3:4]
        >>> Region((0,), (4,)).intersect(Region((4,), (4,))) is None
        True
        """
        self._same_ndim(other)
        offset, size = [], []
        for a, n, b, m in zip(self.offset, self.size, other.offset, other.size, strict=True):
            start, stop = max(a, b), min(a + n, b + m)
            if stop <= start:
                return None
            offset.append(start)
            size.append(stop - start)
        return region_unchecked(tuple(offset), tuple(size))

    def subtract(self, other: Region) -> tuple[Region, ...]:
        """Return this region without `other` as disjoint boxes, at most two per dimension.

        >>> Region((0, 0), (4, 4)).subtract(Region((1, 1), (2, 3)))
        (Region[0:1, 0:4], Region[1:3, 0:1], Region[3:4, 0:4])
        """
        common = self.intersect(other)
        if common is None:
            return () if self.is_empty else (self,)
        before: list[Region] = []
        after: list[Region] = []
        offset, size = list(self.offset), list(self.size)
        # Peel off one dimension after the other: boxes before and after `common` span the later dimensions.
        for dim in range(self.ndim):
            low, high = common.offset[dim] - offset[dim], offset[dim] + size[dim] - common.end[dim]
            if low:
                before.append(region_unchecked(tuple(offset), (*size[:dim], low, *size[dim + 1 :])))
            if high:
                start = (*offset[:dim], common.end[dim], *offset[dim + 1 :])
                after.append(region_unchecked(start, (*size[:dim], high, *size[dim + 1 :])))
            offset[dim], size[dim] = common.offset[dim], common.size[dim]
        return (*before, *reversed(after))

    def contains(self, other: Region) -> bool:
        """True if `other` is within these bounds. For an empty region the bounds count, too.

        >>> Region((0, 0), (4, 4)).contains(Region((1, 1), (3, 3)))
        True
        """
        self._same_ndim(other)
        return all(
            a <= b and b + m <= a + n
            for a, n, b, m in zip(self.offset, self.size, other.offset, other.size, strict=True)
        )

    def shift(self, by: Sequence[int]) -> Region:
        """Return the box shifted by these distances.

        >>> Region((4, 0), (2, 2)).shift((-4, 1))
        Region[0:2, 1:3]
        """
        by = integers(by, "shift")
        if len(by) != self.ndim:
            raise RegionError(f"shift needs {self.ndim} distances for {self}, got {by}")
        return Region(tuple(o + d for o, d in zip(self.offset, by, strict=True)), self.size)

    def within(self, parent: Region) -> Region:
        """Return this region in the coordinates of a buffer that holds `parent`.

        >>> Region((6, 2), (2, 2)).within(Region((4, 0), (4, 8)))
        Region[2:4, 2:4]
        """
        if not parent.contains(self):
            raise RegionError(f"region {self} is not inside {parent}")
        return region_unchecked(tuple(o - p for o, p in zip(self.offset, parent.offset, strict=True)), self.size)

    def slices(self, buffer: Region | None = None) -> tuple[slice, ...]:
        """Return the slices of this region in the full tensor, or in a tensor that holds only the region `buffer`.

        >>> Region((6, 2), (2, 2)).slices()
        (slice(6, 8, None), slice(2, 4, None))
        >>> Region((6, 2), (2, 2)).slices(Region((4, 0), (4, 8)))
        (slice(2, 4, None), slice(2, 4, None))
        """
        box = self if buffer is None else self.within(buffer)
        return tuple(slice(o, o + s) for o, s in zip(box.offset, box.size, strict=True))

    def byte_runs(self, parent: Region | Sequence[int], itemsize: int) -> ByteRuns:
        """Return the byte ranges of this region in the row-major buffer of `parent` (a region or a shape).

        All ranges have the same length, so the result is one length and an ascending array of starts.

        >>> runs = Region((1, 0), (2, 3)).byte_runs((4, 6), itemsize=4)
        >>> runs.starts.tolist(), runs.length
        ([24, 48], 12)
        """
        if itemsize < 1:
            raise RegionError(f"itemsize must be at least 1, got {itemsize}")
        parent = parent if isinstance(parent, Region) else Region.whole(parent)
        box = self.within(parent)
        if box.is_empty:
            return ByteRuns(np.empty(0, np.int64), 0)
        # Trailing dimensions that are spanned entirely form one run with the dimension before them.
        split, run = box.ndim, 1
        while split > 0:
            split -= 1
            run *= box.size[split]
            if box.size[split] != parent.size[split]:
                break
        starts = np.zeros(1, np.int64)
        stride = itemsize * prod(parent.size)
        for dim in range(box.ndim):
            stride //= parent.size[dim]
            first = box.offset[dim] * stride
            count = 1 if dim >= split else box.size[dim]
            starts = (starts[:, None] + (first + stride * np.arange(count, dtype=np.int64))).reshape(-1)
        return ByteRuns(starts, run * itemsize)

    def covers(self, regions: Iterable[Region]) -> Coverage:
        """Return `Exact` if these regions tile this one, else the first gap, overlap or region outside.

        The first in row-major order. O(n log n) for n regions, in any number of dimensions; empty regions are ignored.

        >>> bool(Region((0,), (4,)).covers([Region((0,), (1,)), Region((1,), (3,))]))
        True
        >>> print(Region((0, 0), (2, 4)).covers([Region((0, 0), (2, 3))]))
        gap: nothing holds [0:2, 3:4] of [0:2, 0:4]
        """
        return coverage(self, list(regions))

    def to_json(self) -> dict[str, list[int]]:
        """Return plain lists for JSON.

        >>> Region((0, 2), (4, 3)).to_json()
        {'offset': [0, 2], 'size': [4, 3]}
        """
        return {"offset": list(self.offset), "size": list(self.size)}

    @classmethod
    def from_json(cls, value: dict[str, Any]) -> Region:
        """Build the region from the output of `to_json`.

        >>> Region.from_json({"offset": [0, 2], "size": [4, 3]})
        Region[0:4, 2:5]
        """
        return cls(value["offset"], value["size"])

    def _same_ndim(self, other: Region) -> None:
        if len(self.size) != len(other.size):
            raise RegionError(f"regions must have the same number of dimensions, got {self} and {other}")

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Region):
            return NotImplemented
        return self.offset == other.offset and self.size == other.size

    def __hash__(self) -> int:
        return hash((self.offset, self.size))

    def __setattr__(self, name: str, value: object) -> None:
        raise AttributeError(f"a Region is frozen: cannot set {name!r}")

    def __delattr__(self, name: str) -> None:
        raise AttributeError(f"a Region is frozen: cannot delete {name!r}")

    def __reduce__(self) -> tuple[type[Region], tuple[tuple[int, ...], tuple[int, ...]]]:
        return Region, (self.offset, self.size)

    def __str__(self) -> str:
        return "[" + ", ".join(f"{o}:{o + s}" for o, s in zip(self.offset, self.size, strict=True)) + "]"

    def __repr__(self) -> str:
        return f"Region{self}"


_new, _set = object.__new__, object.__setattr__
_set_offset, _set_size = Region.__dict__["offset"].__set__, Region.__dict__["size"].__set__  # the slots themselves


def region_unchecked(offset: tuple[int, ...], size: tuple[int, ...]) -> Region:
    """Create a Region without validation, in a quarter of the time."""
    region = _new(Region)
    _set_offset(region, offset)
    _set_size(region, size)
    return region


@final
@dataclass(frozen=True, slots=True)
class Exact:
    """The regions tile the parent: every element is covered once. Truthy; the other results are falsy.

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
    """No region covers `region`, a box that starts at the first missing element.

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
    """The regions with indices `first` and `second` both cover `region`.

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
    """The region with this index is not inside the parent.

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
    """Return `Exact` if `regions` tile `parent`, else the first gap, overlap or region outside."""
    for index, region in enumerate(regions):
        if region.ndim != parent.ndim:
            raise RegionError(f"region {index} {region} has {region.ndim} dimensions, but {parent} has {parent.ndim}")
    starts = np.array([r.offset for r in regions], np.int64).reshape(len(regions), parent.ndim)
    return coverage_of_boxes(parent, starts, np.array([r.size for r in regions], np.int64).reshape(starts.shape))


def coverage_of_boxes(parent: Region, starts: Integers, sizes: Integers) -> Coverage:
    """Like `coverage`, for boxes given as arrays with one row per box."""
    stops = starts + sizes

    def region(index: int) -> Region:
        return Region(starts[index].tolist(), sizes[index].tolist())

    low, high = np.array(parent.offset, np.int64), np.array(parent.end, np.int64)
    stray = np.flatnonzero(((starts < low) | (stops > high)).any(axis=1))
    if stray.size:
        return Outside(region(int(stray[0])), int(stray[0]), parent)
    mismatch = first_mismatch(starts, stops, low, high)
    if mismatch is None:
        return Exact()
    point, count = mismatch
    contains = (starts <= point) & (point < stops)
    if count > 0:
        first, second = (int(i) for i in np.flatnonzero(contains.all(axis=1))[:2])
        pair = region(first), region(second)
        common = pair[0].intersect(pair[1])
        assert common is not None  # both hold `point`
        return Overlap(common, first, second, pair)
    end = gap_end(point, starts, stops, high)
    return Gap(region_unchecked(tuple(point.tolist()), tuple((end - point).tolist())), parent)
