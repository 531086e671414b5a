"""Regions are sets of elements: their algebra is checked against numpy masks."""

from __future__ import annotations

import pickle

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardwright import Region
from shardwright.errors import ArgumentTypeError, RegionError
from shardwright.layout import Gap, Outside, Overlap
from shardwright.testing.strategies import regions, shapes


def mask(region: Region, shape: tuple[int, ...]) -> np.ndarray:
    elements = np.zeros(shape, int)
    elements[region.slices()] = 1
    return elements


@st.composite
def shape_and_regions(draw: st.DrawFn, count: int) -> tuple[tuple[int, ...], list[Region]]:
    shape = draw(shapes(max_dims=3, max_side=7))
    return shape, [draw(regions(Region.whole(shape))) for _ in range(count)]


@given(shape_and_regions(2))
def test_intersect_and_subtract_partition(case: tuple[tuple[int, ...], list[Region]]) -> None:
    shape, (a, b) = case
    common, rest = a.intersect(b), a.subtract(b)
    pieces = [*rest, *([common] if common is not None else [])]
    assert all(not piece.is_empty for piece in pieces)
    np.testing.assert_array_equal(sum((mask(p, shape) for p in pieces), np.zeros(shape, int)), mask(a, shape))
    np.testing.assert_array_equal(
        mask(a, shape) & mask(b, shape), mask(common, shape) if common else np.zeros(shape, int)
    )
    assert a.covers(pieces)


@given(shape_and_regions(2))
def test_contains_agrees_with_the_elements(case: tuple[tuple[int, ...], list[Region]]) -> None:
    shape, (a, b) = case
    if not b.is_empty:
        assert a.contains(b) == bool((mask(a, shape) >= mask(b, shape)).all())
    assert a.volume == mask(a, shape).sum()


@given(shape_and_regions(1), st.integers(1, 8))
def test_byte_runs_cover_exactly_the_bytes_of_the_region(
    case: tuple[tuple[int, ...], list[Region]], itemsize: int
) -> None:
    shape, (region,) = case
    whole = np.arange(int(np.prod(shape)) * itemsize).reshape(*shape, itemsize)
    runs = region.byte_runs(shape, itemsize)
    found = [byte for start in runs.starts.tolist() for byte in range(start, start + runs.length)]
    assert found == whole[region.slices()].reshape(-1).tolist()
    # Maximal: no run begins where the one before ended.
    assert not np.any(np.diff(runs.starts) == runs.length) or runs.length == 0


@given(shape_and_regions(1), st.data())
def test_slices_relative_to_a_frame_select_the_same_elements(
    case: tuple[tuple[int, ...], list[Region]], data: st.DataObject
) -> None:
    shape, (buffer,) = case
    part = data.draw(regions(buffer))
    whole = np.arange(int(np.prod(shape))).reshape(shape)
    np.testing.assert_array_equal(whole[buffer.slices()][part.slices(buffer)], whole[part.slices()])
    assert part.within(buffer).shift(buffer.offset) == part


@given(shape_and_regions(4))
def test_covers_agrees_with_counting_every_element(case: tuple[tuple[int, ...], list[Region]]) -> None:
    shape, boxes = case
    whole = Region.whole(shape)
    counts = sum((mask(box, shape) for box in boxes), np.zeros(shape, int))
    answer = whole.covers(boxes)
    assert bool(answer) == bool((counts == 1).all())
    wrong = np.argwhere(counts != 1)
    if isinstance(answer, Gap):
        assert (counts[answer.region.slices()] == 0).all()
        assert answer.region.offset == tuple(wrong[0])
    elif isinstance(answer, Overlap):
        assert answer.first != answer.second
        assert answer.region == boxes[answer.first].intersect(boxes[answer.second])
        assert mask(answer.region, shape)[tuple(wrong[0])] == 1


@given(shapes(min_dims=1, max_dims=3, max_side=7), st.data())
def test_covers_accepts_every_tiling_of_a_region(shape: tuple[int, ...], data: st.DataObject) -> None:
    """Cut a box again and again: the pieces tile it; without one, or with one twice, they do not."""
    pieces = [Region.whole(shape)]
    for _ in range(data.draw(st.integers(0, 6))):
        cut = pieces.pop(data.draw(st.integers(0, len(pieces) - 1)))
        hole = data.draw(regions(cut))
        common = cut.intersect(hole)
        pieces += [*cut.subtract(hole), *([common] if common else [])]
        if not pieces:
            return
    pieces = data.draw(st.permutations(pieces))
    assert Region.whole(shape).covers(pieces)
    if not pieces[0].is_empty:
        assert isinstance(Region.whole(shape).covers(pieces[1:]), Gap)
        assert isinstance(Region.whole(shape).covers([pieces[0], *pieces]), Overlap)


def test_covers_reports_the_first_gap_overlap_and_region_outside() -> None:
    whole = Region.whole((4, 4))
    gap = whole.covers([Region((0, 0), (4, 2)), Region((2, 2), (2, 2))])
    assert str(gap) == "gap: nothing holds [0:2, 2:4] of [0:4, 0:4]"
    overlap = whole.covers([Region((0, 0), (3, 4)), Region((2, 0), (2, 4))])
    assert str(overlap) == "overlap: region 0 [0:3, 0:4] and region 1 [2:4, 0:4] both hold [2:3, 0:4]"
    stray = whole.covers([Region((0, 0), (4, 5))])
    assert isinstance(stray, Outside)
    assert str(stray) == "outside: region 0 [0:4, 0:5] is not inside [0:4, 0:4]"


def test_a_scalar_is_covered_once() -> None:
    scalar = Region((), ())
    assert scalar.covers([scalar])
    assert isinstance(scalar.covers([]), Gap)
    assert isinstance(scalar.covers([scalar, scalar]), Overlap)


def test_regions_are_immutable_hashable_and_picklable() -> None:
    region = Region([1, 2], np.array([3, 4]))
    assert region == Region((1, 2), (3, 4))
    assert hash(region) == hash(Region((1, 2), (3, 4)))
    assert region != Region((1, 2), (3, 5))
    assert region != "Region"
    assert pickle.loads(pickle.dumps(region)) == region
    assert Region.from_json(region.to_json()) == region
    with pytest.raises(AttributeError, match="frozen"):
        region.offset = (0, 0)
    with pytest.raises(AttributeError, match="frozen"):
        del region.size


@pytest.mark.parametrize(
    ("make", "error", "text"),
    [
        (lambda: Region((0,), (-1,)), RegionError, r"size must not be negative, got \(-1,\) \(dimension 0\)"),
        (lambda: Region((0, -2), (1, 1)), RegionError, r"offset must not be negative, got \(0, -2\) \(dimension 1\)"),
        (lambda: Region((0,), (1, 1)), RegionError, r"must have the same length, got \(0,\) and \(1, 1\)"),
        (lambda: Region((0.5,), (1,)), ArgumentTypeError, "offset must be an int, got float: 0.5"),
        (lambda: Region(3, (1,)), ArgumentTypeError, "offset must be a sequence of ints, got int: 3"),
        (lambda: Region("ab", (1, 1)), ArgumentTypeError, "got str: 'ab'"),
        (lambda: Region((True,), (1,)), ArgumentTypeError, "got bool: True"),
        (lambda: Region((0,), (4,)).within(Region((2,), (4,))), RegionError, r"\[0:4\] is not inside \[2:6\]"),
        (lambda: Region((0,), (4,)).intersect(Region((0, 0), (1, 1))), RegionError, "the same number of dimensions"),
        (lambda: Region((0,), (4,)).shift((1, 1)), RegionError, "shift needs 1 distances"),
        (lambda: Region((0,), (4,)).shift((-1,)), RegionError, "negative"),
        (lambda: Region((0,), (4,)).byte_runs((4,), 0), RegionError, "itemsize must be at least 1, got 0"),
        (lambda: Region((0,), (4,)).covers([Region((0, 0), (4, 1))]), RegionError, "region 0 .* has 2 dimensions"),
    ],
)
def test_invalid_arguments_raise_with_the_value_and_the_rule(make: object, error: type[Exception], text: str) -> None:
    with pytest.raises(error, match=text):
        make()
