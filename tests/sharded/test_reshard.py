"""Resharding, gathering and sharding equal slicing the unsharded tensor with torch, with minimal traffic.

The lower bound is computed element by element: a rank receives those of its new shards that it does not hold.
"""

from __future__ import annotations

import random
from collections import Counter
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from hypothesis import settings
from tilings import random_tiling
from torch import Tensor

from shardwright import comm, sharded
from shardwright.errors import UnsupportedError
from shardwright.sharded import ChunkShardingSpec, EnumerableShardingSpec, ShardMetadata
from shardwright.sharded.transfer import transfer
from shardwright.testing import run_ranks

RANKS = 4
DTYPES = [
    *(torch.float32, torch.float64, torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2, torch.complex64),
    *(torch.complex128, torch.bool, torch.uint8, torch.int16, torch.int32, torch.int64, torch.uint16, torch.uint64),
]


class Case(NamedTuple):
    shape: tuple[int, ...]
    source: list[ShardMetadata]
    target: list[ShardMetadata]
    dtype: torch.dtype
    buffer: int
    root: int
    seed: int


def random_cases(seed: int, count: int) -> list[Case]:
    rng = random.Random(seed)
    cases = []
    for number in range(count):
        shape = tuple(rng.choice([0, 1, 2, 3, 5, 8, 13]) for _ in range(rng.choice([0, 1, 1, 2, 2, 3])))
        source, target = (tiling(rng, shape) for _ in range(2))
        dtype, buffer = rng.choice(DTYPES), rng.choice([1 << 26, 1 << 26, 64, 16])
        cases.append(Case(shape, source, target, dtype, buffer, rng.randrange(RANKS), seed + number))
    return cases


def tiling(rng: random.Random, shape: tuple[int, ...]) -> list[ShardMetadata]:
    if shape and rng.random() < 0.9:
        return random_tiling(rng, shape, RANKS)
    return [ShardMetadata([0] * len(shape), shape, f"rank:{rng.randrange(RANKS)}/cpu")]


def whole_of(case: Case) -> Tensor:
    numbers = torch.randint(-60, 60, case.shape, generator=torch.Generator().manual_seed(case.seed))
    return numbers.to(case.dtype)


def raw(tensor: Tensor) -> Tensor:
    return tensor.contiguous().view(-1).view(torch.uint8)


def owners(shards: list[ShardMetadata], shape: tuple[int, ...]) -> np.ndarray:
    """Who holds each element."""
    found = np.full(shape, -1)
    for shard in shards:
        found[shard.region.slices()] = shard.placement.rank()
    assert not (found == -1).any()
    return found


def assert_holds(made: sharded.ShardedTensor, shards: list[ShardMetadata], whole: Tensor, rank: int) -> None:
    mine = [shard for shard in shards if shard.placement.rank() == rank]
    assert [shard.metadata for shard in made.local_shards()] == mine
    assert made.shards_metadata() == shards
    for shard in made.local_shards():
        assert shard.tensor.shape == tuple(shard.metadata.shard_sizes)
        assert shard.tensor.dtype == whole.dtype
        assert torch.equal(raw(shard.tensor), raw(whole[shard.metadata.region.slices()])), shard.metadata


def run_cases(cases: list[Case]) -> Counter[str]:
    """Sees to every case, and tells what was seen."""
    rank, seen = comm.world().rank, Counter()
    for case in cases:
        whole, size = whole_of(case), whole_of(case).itemsize
        before, after = owners(case.source, case.shape), owners(case.target, case.shape)
        source, target = EnumerableShardingSpec(case.source), EnumerableShardingSpec(case.target)
        transfer._BUFFER = case.buffer
        try:
            garbage = torch.zeros_like(whole, dtype=torch.float32).to(case.dtype)
            with comm.count() as traffic:
                made = source.shard(whole if rank == case.root else garbage, src_rank=case.root)
            assert traffic.bytes == size * int((before == rank).sum()) * (rank != case.root)
            assert_holds(made, case.source, whole, rank)

            held = [shard.tensor for shard in made.local_shards()]
            kept = [tensor.clone() for tensor in held]
            with comm.count() as traffic:
                assert made.reshard(target) is made
            assert traffic.bytes == size * int(((after == rank) & (before != rank)).sum()), (case, traffic)
            assert_holds(made, case.target, whole, rank)
            assert made.sharding_spec() is target
            assert all(torch.equal(raw(a), raw(b)) for a, b in zip(held, kept, strict=True))  # not written to
            seen["rounds"] += traffic.calls["exchange"] > 1

            with comm.count() as traffic:
                gathered = made.gather(case.root)
            assert traffic.bytes == size * int((after != rank).sum()) * (rank == case.root)
            assert (gathered is None) == (rank != case.root)
            if gathered is not None:
                assert gathered.shape == case.shape
                assert torch.equal(raw(gathered), raw(whole))
        finally:
            transfer._BUFFER = 64 << 20
        seen["several"] += len(held) > 1
        seen["none"] += not held
        seen["empty"] += not whole.numel()
        seen["scalar"] += not case.shape
    return seen


@pytest.mark.parametrize("seed", range(4))
def test_resharding_random_tilings_equals_gather_then_split_with_minimal_traffic(seed: int) -> None:
    cases = random_cases(10_000 * seed, 2 * settings.default.max_examples)  # 50, so 200 in all; 8,000 in test-full
    seen = sum(run_ranks(RANKS, run_cases, cases, timeout=170.0), Counter())
    for what in ("rounds", "several", "none", "empty", "scalar"):
        assert seen[what], f"no case with {what}"


# Gradients.


def split(whole: Tensor, shards: list[ShardMetadata], rank: int) -> list[Tensor]:
    return [whole[shard.region.slices()] for shard in shards if shard.placement.rank() == rank]


def leaf(whole: Tensor, shards: list[ShardMetadata]) -> sharded.ShardedTensor:
    made = EnumerableShardingSpec(shards).shard(whole.detach())
    return made.requires_grad_()


def on(rank: int, rows: tuple[int, int]) -> ShardMetadata:
    return ShardMetadata([rows[0], 0], [rows[1] - rows[0], 3], f"rank:{rank}/cpu")


EVERYWHERE = [on(1, (0, 1)), on(0, (1, 4)), on(3, (4, 6)), on(2, (6, 6)), on(0, (6, 8))]
ELSEWHERE = [on(0, (0, 2)), on(2, (2, 5)), on(1, (5, 6)), on(3, (6, 7)), on(2, (7, 8))]
NOT_ON_2 = [on(0, (0, 5)), on(1, (5, 7)), on(3, (7, 8))]


@pytest.mark.parametrize(("source", "target"), [(EVERYWHERE, ELSEWHERE), (NOT_ON_2, ELSEWHERE), (NOT_ON_2, NOT_ON_2)])
def test_gradients_flow_back_to_the_source_shards(source: list[ShardMetadata], target: list[ShardMetadata]) -> None:
    def work() -> None:
        rank = comm.world().rank
        whole = torch.randn(8, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(1)).requires_grad_()
        weight = torch.randn(8, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(2))
        (whole**3 * weight).sum().backward()
        x = leaf(whole, source)
        y = x.clone()
        assert not y.is_leaf
        y.reshard(EnumerableShardingSpec(target))
        assert y.requires_grad
        assert not y.is_leaf
        pieces = [shard.tensor for shard in y.local_shards()]
        assert all(piece.requires_grad for piece in pieces)
        if pieces:
            sum((p**3 * w).sum() for p, w in zip(pieces, split(weight, target, rank), strict=True)).backward()
        expected = split(whole.grad, source, rank)
        for shard, gradient in zip(x.local_shards(), expected, strict=True):
            torch.testing.assert_close(shard.tensor.grad, gradient)

    run_ranks(RANKS, work)


def test_reshard_is_twice_differentiable() -> None:
    def work() -> None:
        rank = comm.world().rank
        whole = torch.randn(8, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(1)).requires_grad_()
        [first] = torch.autograd.grad((whole**3).sum(), whole, create_graph=True)
        (first**2).sum().backward()
        x = leaf(whole, EVERYWHERE)
        held = [shard.tensor for shard in x.local_shards()]
        y = x.clone().reshard(EnumerableShardingSpec(ELSEWHERE))
        loss = sum((shard.tensor**3).sum() for shard in y.local_shards())
        gradients = torch.autograd.grad(loss, held, create_graph=True)
        for gradient, expected in zip(gradients, split(first.detach(), EVERYWHERE, rank), strict=True):
            torch.testing.assert_close(gradient.detach(), expected)
        sum((gradient**2).sum() for gradient in gradients).backward()
        for tensor, expected in zip(held, split(whole.grad, EVERYWHERE, rank), strict=True):
            torch.testing.assert_close(tensor.grad, expected)

    run_ranks(RANKS, work)


def test_resharding_away_from_a_rank_that_needs_a_gradient_raises_on_all_ranks() -> None:
    def work() -> list[Any]:
        x = leaf(torch.ones(8, 3), EVERYWHERE)
        with pytest.raises(UnsupportedError) as caught:
            x.clone().reshard(EnumerableShardingSpec(NOT_ON_2))
        with torch.no_grad():  # what has no history has no way back
            moved = x.clone().reshard(EnumerableShardingSpec(NOT_ON_2))
        assert not moved.requires_grad
        return [str(caught.value), len(moved.local_shards())]

    found = run_ranks(RANKS, work)
    assert len({text for text, _ in found}) == 1
    assert found[0][0].startswith("ranks [2] hold shards that require grad and would hold none afterwards")
    assert [count for _, count in found] == [1, 1, 0, 1]


def test_resharded_leaves_are_new_leaves_without_gradients() -> None:
    def work() -> None:
        x = leaf(torch.ones(8, 3), EVERYWHERE)
        for shard in x.local_shards():
            shard.tensor.sum().backward()
        x.reshard(EnumerableShardingSpec(ELSEWHERE))
        assert x.requires_grad
        assert x.is_leaf
        assert x.grad is None
        for shard in x.local_shards():
            assert shard.tensor.is_leaf
            assert shard.tensor.requires_grad

    run_ranks(RANKS, work)


def test_to_keeps_autograd_history() -> None:
    x = leaf(torch.ones(4, 3), [ShardMetadata([0, 0], [4, 3], "rank:0/cpu")])
    y = x.to(torch.float64)
    assert not y.is_leaf
    y.reshard(ChunkShardingSpec(0, ["rank:0/cpu"] * 2))
    sum((shard.tensor * (n + 1)).sum() for n, shard in enumerate(y.local_shards())).backward()
    assert x.local_tensor().grad.tolist() == [[1.0] * 3] * 2 + [[2.0] * 3] * 2
