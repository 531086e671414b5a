"""`overlaps` finds the pairs that comparing every box with every other one finds."""

from __future__ import annotations

import random

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardwright import Region
from shardwright.errors import RegionError
from shardwright.layout import Boxes, overlap, overlaps
from shardwright.testing.strategies import regions, shapes


def pairs_by_comparing_all(first: list[Region], second: list[Region]) -> list[tuple[int, int, Region]]:
    found = []
    for i, a in enumerate(first):
        for j, b in enumerate(second):
            if not a.is_empty and not b.is_empty and (common := a.intersect(b)) is not None:
                found.append((i, j, common))
    return found


def pairs_found(first: list[Region], second: list[Region]) -> list[tuple[int, int, Region]]:
    found = overlaps(Boxes.of(first), Boxes.of(second))
    boxes = zip(found.offsets.tolist(), found.sizes.tolist(), strict=True)
    return [(i, j, Region(*box)) for i, j, box in zip(found.first.tolist(), found.second.tolist(), boxes, strict=True)]


@st.composite
def two_lists(draw: st.DrawFn) -> tuple[list[Region], list[Region]]:
    """Boxes of one tensor, some of them empty and some of them twice."""
    whole = Region.whole(draw(shapes(max_dims=3, max_side=12)))
    lists = []
    for _ in range(2):
        some = draw(st.lists(regions(whole), max_size=12))
        again = draw(st.lists(st.sampled_from(some), max_size=4)) if some else []
        lists.append([*some, *again])
    return lists[0], lists[1]


# How many pairs are compared whole, and how many at a time: small numbers have every branch taken.
@pytest.mark.parametrize("sizes", [(1 << 14, 1 << 22), (0, 1 << 22), (0, 3), (8, 5)], ids=str)
@given(lists=two_lists())
def test_every_overlapping_pair_is_found_once_in_order(
    sizes: tuple[int, int], lists: tuple[list[Region], list[Region]]
) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(overlap, "_MAX_PAIRWISE", sizes[0])
        patch.setattr(overlap, "_MAX_PAIRS_AT_ONCE", sizes[1])
        assert pairs_found(*lists) == pairs_by_comparing_all(*lists)


def scattered(rng: random.Random, count: int, ndim: int, side: int, longest: int) -> list[Region]:
    sizes = [[rng.randint(0, longest) for _ in range(ndim)] for _ in range(count)]
    return [Region([rng.randint(0, side - length) for length in size], size) for size in sizes]


@pytest.mark.parametrize("kind", ["scattered", "rows and columns", "half rows, half columns", "one place"])
def test_hundreds_of_boxes_agree_with_brute_force(kind: str) -> None:
    rng = random.Random(3)
    match kind:
        case "scattered":
            first, second = (scattered(rng, 700, 2, 500, 40) for _ in range(2))
        case "rows and columns":
            first = [Region((row, 0), (1, 300)) for row in range(300)]
            second = [Region((0, column), (300, 1)) for column in range(300)]
        case "half rows, half columns":
            first = [Region((row, 0), (1, 150)) for row in range(300)]
            first += [Region((0, 150 + column), (300, 1)) for column in range(150)]
            second = scattered(rng, 500, 2, 300, 25)
        case _:
            first, second = [Region((5, 5), (3, 3))] * 300, [Region((6, 6), (9, 1))] * 300
    assert pairs_found(first, second) == pairs_by_comparing_all(first, second)


def test_a_grid_of_100_000_boxes_overlaps_a_finer_grid_as_expected() -> None:
    def grid(count: int, step: int) -> Boxes:
        offsets = step * np.stack(np.meshgrid(np.arange(count), np.arange(count), indexing="ij"), -1).reshape(-1, 2)
        return Boxes(offsets, np.full_like(offsets, step))

    found = overlaps(grid(316, 6), grid(474, 4))
    along = sum(min(6 * a + 6, 4 * b + 4) > max(6 * a, 4 * b) for a in range(316) for b in range(474))
    assert len(found.first) == along**2
    assert int(found.sizes.prod(axis=1).sum()) == (316 * 6) ** 2


def test_empty_lists_have_no_overlaps_and_scalars_overlap() -> None:
    assert pairs_found([], [Region((0, 0), (2, 2))]) == pairs_found([Region((0, 0), (2, 2))], []) == []
    assert pairs_found([Region((), ())], [Region((), ())] * 2) == [(0, 0, Region((), ())), (0, 1, Region((), ()))]


def test_boxes_of_different_dimensionality_raise() -> None:
    with pytest.raises(RegionError, match="the same number of dimensions, got 1 and 2"):
        overlaps(Boxes.of([Region((0,), (1,))]), Boxes.of([Region((0, 0), (1, 1))]))
