"""Transfer plans: the plan of each rank is its part of the full plan."""

from __future__ import annotations

import random

import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st
from tilings import random_tiling

from shardwright.layout import RegionTable
from shardwright.sharded import ShardedTensorMetadata, plan_transfer, plan_transfer_for_rank

RANKS = 5


def table(seed: int, shape: list[int]) -> RegionTable:
    shards = random_tiling(random.Random(seed), shape, RANKS)
    return ShardedTensorMetadata(shards, torch.Size(shape)).table(lambda placement: placement.rank())


def held(regions: RegionTable, shape: list[int], what: np.ndarray) -> np.ndarray:
    """For each element, the number in `what` of the shard that holds it."""
    found = np.full(shape, -1)
    for number, (offset, size) in enumerate(zip(regions.offsets.tolist(), regions.sizes.tolist(), strict=True)):
        found[tuple(slice(o, o + s) for o, s in zip(offset, size, strict=True))] = what[number]
    return found


@given(st.integers(0, 2**32), st.lists(st.integers(0, 8), min_size=1, max_size=3))
def test_a_plan_transfers_every_element_exactly_once(seed: int, shape: list[int]) -> None:
    source, target = table(seed, shape), table(seed + 1, shape)
    moves = plan_transfer(source, target)
    old, new = (held(side, shape, np.arange(len(side.ranks))) for side in (source, target))
    times = np.zeros(shape, int)
    for row in range(len(moves.sources)):
        slices = moves.region(row).slices()
        times[slices] += 1
        assert (old[slices] == moves.sources[row]).all()
        assert (new[slices] == moves.targets[row]).all()
        assert moves.senders[row] == source.ranks[moves.sources[row]]
        assert moves.receivers[row] == target.ranks[moves.targets[row]]
    assert (times == 1).all()
    order = list(zip(moves.sources.tolist(), moves.targets.tolist(), strict=True))
    assert order == sorted(set(order))


@given(st.integers(0, 2**32), st.lists(st.integers(0, 8), min_size=1, max_size=3))
def test_the_plan_of_a_rank_is_its_part_of_the_full_plan(seed: int, shape: list[int]) -> None:
    source, target = table(seed, shape), table(seed + 1, shape)
    everything = plan_transfer(source, target)
    before, after = (held(side, shape, side.ranks) for side in (source, target))
    for rank in range(RANKS + 1):
        part = (everything.senders == rank) | (everything.receivers == rank)
        for own, all_of_them in zip(plan_transfer_for_rank(source, target, rank), everything, strict=True):
            np.testing.assert_array_equal(own, all_of_them[part])
        assert everything.received(rank, 4) == 4 * int(((after == rank) & (before != rank)).sum())
        assert everything.sent(rank, 4) == 4 * int(((before == rank) & (after != rank)).sum())


def test_the_text_of_a_plan_counts_boxes_and_elements() -> None:
    rows = RegionTable(np.array([0, 1]), np.array([[0], [2]]), np.array([[2], [2]]))
    whole = RegionTable(np.array([1]), np.array([[0]]), np.array([[4]]))
    assert str(plan_transfer(rows, whole)) == "1 boxes of 2 elements travel, 1 boxes stay"
