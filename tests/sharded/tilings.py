"""Random tilings of a tensor: any boxes, on any ranks, several on some and none on others."""

from __future__ import annotations

import random
from collections.abc import Sequence

from shardwright.sharded import ShardMetadata

Box = tuple[list[int], list[int]]


def random_tiling(rng: random.Random, shape: Sequence[int], ranks: int) -> list[ShardMetadata]:
    """Boxes that tile the shape, by cutting it in two again and again, each with an owner among so many ranks.

    Boxes may be empty, ranks may own none, and the boxes come in any order.
    """
    boxes = _cut(rng, ([0] * len(shape), list(shape)), rng.choice([0, 1, 2, 3, 4]), _dims(rng, len(shape)))
    owners = rng.sample(range(ranks), rng.randint(1, ranks))
    rng.shuffle(boxes)
    return [ShardMetadata(offsets, sizes, f"rank:{rng.choice(owners)}/cpu") for offsets, sizes in boxes]


def _dims(rng: random.Random, ndim: int) -> list[int]:
    """Strategy: the sharded dimensions, often only one."""
    return [rng.randrange(ndim)] if rng.random() < 0.5 else list(range(ndim))


def _cut(rng: random.Random, box: Box, depth: int, dims: Sequence[int]) -> list[Box]:
    offsets, sizes = box
    if depth == 0:
        return [box]
    dim = rng.choice(dims)
    size = sizes[dim]
    at_an_end = rng.random() < 0.1  # it leaves an empty box, which is as welcome as any other, only rarer
    if size < 2 and not at_an_end:
        return [box]
    at = rng.choice([0, size]) if at_an_end else rng.randint(1, size - 1)
    low = (list(offsets), [*sizes[:dim], at, *sizes[dim + 1 :]])
    high = ([*offsets[:dim], offsets[dim] + at, *offsets[dim + 1 :]], [*sizes[:dim], size - at, *sizes[dim + 1 :]])
    return _cut(rng, low, depth - rng.choice([1, 1, 2]) if depth > 1 else 0, dims) + _cut(rng, high, depth - 1, dims)
