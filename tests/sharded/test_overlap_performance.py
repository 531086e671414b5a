"""Overlapping shards are found without comparing all pairs."""

from __future__ import annotations

import time

import numpy as np
import pytest

from shardwright.errors import (
    TilingError,
)
from shardwright.layout import Boxes, overlaps
from shardwright.layout.overlap import overlapping_pair
from shardwright.sharded import (
    EnumerableShardingSpec,
    ShardMetadata,
)


def test_many_identical_shards_after_a_gap_are_rejected_quickly() -> None:
    shards = [ShardMetadata([0], [1])] + [ShardMetadata([2], [1])] * 50_000
    started = time.monotonic()
    with pytest.raises(TilingError, match=r"overlap: shard 1 \[2:3\] and shard 2 \[2:3\] both hold \[2:3\]"):
        EnumerableShardingSpec(shards)
    assert time.monotonic() - started < 5  # all pairs would be 2,500 million


def test_overlapping_pair_agrees_with_overlaps() -> None:
    rng, disjoint = np.random.default_rng(0), 0
    for number in range(60):
        count, ndim = int(rng.integers(1, 300)), int(rng.integers(1, 4))
        boxes = Boxes(rng.integers(0, 60, (count, ndim)), rng.integers(0, 2 + number % 5, (count, ndim)))
        found = overlaps(boxes, boxes)
        expected = set(zip(found.first.tolist(), found.second.tolist(), strict=True))
        pair = overlapping_pair(boxes)
        disjoint += pair is None
        if pair is None:
            assert all(first == second for first, second in expected)
        else:
            assert pair in expected
            assert pair[0] < pair[1]
    assert 0 < disjoint < 60
