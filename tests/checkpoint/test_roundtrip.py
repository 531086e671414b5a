"""A state saved in any layout on any number of ranks loads in any other layout on any other number, bit by bit."""

from __future__ import annotations

import math
import os
import random
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch

import shardwright as sw
from shardwright import checkpoint, comm, sharded
from shardwright.layout import Region
from shardwright.tensor.base.tagging import local_region, tag
from shardwright.testing import run_ranks

CASES = 300 if os.environ.get("SHARDWRIGHT_BUDGET") == "full" else 30
PAIRS = [(n, m) for n in range(1, 5) for m in range(1, 5)]
DTYPES = [
    *(torch.bool, torch.uint8, torch.int8, torch.uint16, torch.int16, torch.uint32, torch.int32, torch.uint64),
    *(torch.int64, torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.complex32, torch.complex64),
    *(torch.complex128, torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e4m3fnuz, torch.float8_e5m2fnuz),
    torch.float8_e8m0fnu,
]


def carried(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor as bytes, a dimension more: torch computes with those of every dtype."""
    return tensor.detach().contiguous().view(-1).view(torch.uint8).view(*tensor.shape, tensor.itemsize)


def wholes(seed: int) -> dict[str, torch.Tensor]:
    """The tensors of a case, the same on all ranks."""
    rng = random.Random(f"whole {seed}")
    generator = torch.Generator().manual_seed(seed)
    found = {}
    for number in range(rng.randint(1, 6)):
        large = rng.random() < 0.15
        sides = [rng.choice([0, 1, 2, 3, 5, 7, 8, 9]) for _ in range(rng.randint(0, 4))]
        shape = [rng.randint(60, 90), rng.randint(1, 5), rng.randint(60, 90)] if large else sides
        dtype = rng.choice(DTYPES)
        count = math.prod(shape) * dtype.itemsize
        raw = torch.randint(0, 2 if dtype == torch.bool else 256, (count,), dtype=torch.uint8, generator=generator)
        found[f"t{number}"] = raw.view(dtype).view(shape)
    return found


def random_layout(shape: tuple[int, ...], size: int, rng: random.Random) -> sw.Layout:
    """Any layout of this shape over some or all of so many ranks."""
    ranks = rng.sample(range(size), rng.choice([size, size, rng.randint(1, size)]))
    sides = [len(ranks)]
    if len(ranks) == 4 and rng.random() < 0.6:
        sides = rng.choice([[2, 2], [4, 1], [1, 4], [2, 1, 2]])
    mesh = sw.Mesh(sides, None, ranks)
    placements: list[sw.Placement] = []
    cut: set[int] = set()
    for side in sides:
        dim = rng.randrange(len(shape)) if shape else None
        kind = rng.choice(["replicate", "shard", "shard", "ragged"])
        if dim is None or kind == "replicate":
            placements.append(sw.Replicate())
        elif kind == "ragged" and dim not in cut:
            marks = sorted(rng.randint(0, shape[dim]) for _ in range(side - 1))
            sizes = [b - a for a, b in zip([0, *marks], [*marks, shape[dim]], strict=True)]
            placements.append(sw.Ragged(dim, sizes))
            cut.add(dim)
        else:
            placements.append(sw.Shard(dim))
            cut.add(dim)
    order = None
    if not any(isinstance(one, sw.Ragged) for one in placements) and rng.random() < 0.4:
        order = rng.sample(range(len(sides)), len(sides))
    return sw.Layout(mesh, placements, shape, order)


def random_boxes(shape: tuple[int, ...], rng: random.Random) -> list[Region]:
    """Boxes that tile a shape, made by cutting some of them again and again; some may be empty."""
    boxes = [Region.whole(shape)]
    for _ in range(rng.randint(0, 4)):
        box = boxes.pop(rng.randrange(len(boxes)))
        dim = rng.randrange(len(shape))
        at = rng.randint(0, box.size[dim])
        low = list(box.size)
        low[dim] = at
        high, start = list(box.size), list(box.offset)
        high[dim] -= at
        start[dim] += at
        boxes += [Region(box.offset, low), Region(start, high)]
    return boxes


def empty(size: tuple[int, ...], dtype: torch.dtype, rng: random.Random) -> torch.Tensor:
    """New memory of ones in every bit, contiguous or not."""
    order = list(range(len(size)))
    if rng.random() < 0.3:
        rng.shuffle(order)
    laid = [size[dim] for dim in order]
    raw = torch.full((math.prod(size) * dtype.itemsize,), 1, dtype=torch.uint8)
    return raw.view(dtype).view(laid).permute([order.index(dim) for dim in range(len(size))])


def fill(tensor: torch.Tensor, values: torch.Tensor) -> None:
    """Copies bits: torch cannot copy every dtype into every stride."""
    carriers = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64, 16: torch.complex128}
    carrier = carriers[tensor.itemsize]
    tensor.view(carrier).copy_(values.view(carrier))


def state_of(seed: int, what: str, *, filled: bool) -> tuple[dict[str, Any], list[tuple[str, Region, torch.Tensor]]]:
    """A state of a case under a random layout, and its local parts: which region of which tensor each is."""
    size = comm.world().size
    rng = random.Random(f"{what} {size} {seed}")
    values = wholes(seed)
    state: dict[str, Any] = {}
    parts: list[tuple[str, Region, torch.Tensor]] = []
    for name, whole in values.items():
        shape, dtype = tuple(whole.shape), whole.dtype
        kind = rng.choice(["plain", "dtensor", "dtensor", "dtensor", "sharded"] if shape else ["plain", "dtensor"])
        own = random.Random(rng.random())  # what only this rank needs does not move the others' numbers
        if kind == "plain":
            state[name] = empty(shape, dtype, own)
            mine = [(name, Region.whole(shape), state[name])]
        elif kind == "dtensor":
            layout = random_layout(shape, size, own)
            local = empty(local_region(layout).size, dtype, own)
            state[name] = tag(local, layout)
            mine = [(name, layout.region(comm.rank()), state[name].to_local())] if comm.rank() in layout.mesh else []
        else:
            boxes = random_boxes(shape, own)
            shards = [
                sharded.ShardMetadata(list(box.offset), list(box.size), f"rank:{own.randrange(size)}/cpu")
                for box in boxes
            ]
            table = sharded.ShardedTensor(sharded.EnumerableShardingSpec(shards), shape, dtype=dtype)
            state[name] = table
            mine = [(name, shard.metadata.region, shard.tensor) for shard in table.local_shards()]
        parts += mine
    if filled:
        for name, region, tensor in parts:
            fill(tensor, values[name][region.slices()])
    items = list(state.items())
    rng.shuffle(items)
    return dict(items), parts


def save_all(seeds: list[int], folder: Path) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of complex32
        for seed in seeds:
            state, _ = state_of(seed, "save", filled=True)
            checkpoint.save(state | {"seed": seed}, folder / str(seed))


def load_all(seeds: list[int], folder: Path) -> int:
    compared = 0
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of complex32
        for seed in seeds:
            values = wholes(seed)
            state, parts = state_of(seed, "load", filled=False)
            made = checkpoint.load(state | {"seed": -1}, folder / str(seed))
            assert made["seed"] == seed
            for name, region, tensor in parts:
                expected = values[name][region.slices()]
                assert torch.equal(carried(tensor), carried(expected)), (seed, name, region)
                compared += tensor.numel()
    return compared


@pytest.mark.filterwarnings("ignore:ComplexHalf")
@pytest.mark.parametrize(("n", "m"), PAIRS)
def test_any_layout_loads_into_any_other_layout(n: int, m: int, tmp_path: Path) -> None:
    place = PAIRS.index((n, m))
    seeds = [seed for seed in range(CASES) if seed % len(PAIRS) == place]
    run_ranks(n, save_all, seeds, tmp_path)
    assert sum(run_ranks(m, load_all, seeds, tmp_path)) > 0 or all(
        not any(whole.numel() for whole in wholes(seed).values()) for seed in seeds
    )
    for seed in seeds:
        made = checkpoint.read(tmp_path / str(seed))
        for name, whole in wholes(seed).items():
            assert (made[name].dtype, made[name].shape) == (whole.dtype, whole.shape)
            assert torch.equal(carried(made[name]), carried(whole)), (seed, name)
        assert checkpoint.verify(tmp_path / str(seed))
