"""ShardedTensors and DTensors convert into each other, sharing memory if regions agree, else with minimal traffic."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tilings import random_tiling

import shardwright as sw
from shardwright import comm, sharded
from shardwright.errors import (
    ArgumentTypeError,
    DisagreementError,
    MeshError,
    PlacementError,
    ShardwrightError,
    UnsupportedError,
)
from shardwright.layout import Layout, Mesh, Partial, Ragged, Region, Replicate, Shard
from shardwright.sharded import ChunkShardingSpec, EnumerableShardingSpec, ShardMetadata
from shardwright.testing import run_ranks
from shardwright.testing.strategies import layouts, meshes, shapes

FOUR = ["rank:0/cpu", "rank:1/cpu", "rank:2/cpu", "rank:3/cpu"]
on_four = meshes(size=4)
some_layouts = layouts(shapes(max_dims=3), on_four, partial=False)
cut_layouts = layouts(shapes(min_dims=1, max_dims=3), on_four, partial=False)


def values(shape: Sequence[int]) -> torch.Tensor:
    return torch.arange(1.0, torch.Size(shape).numel() + 1).reshape(tuple(shape))


def mark(shape: Sequence[int], regions: Sequence[Region]) -> Any:
    """Return a mask of the elements in any of these regions, without using plans."""
    held = np.zeros(tuple(shape), bool)
    for region in regions:
        held[region.slices()] = True
    return held


def lacking(shape: Sequence[int], before: Sequence[Region], after: Sequence[Region]) -> int:
    """Bytes of float32 in `after` that are not in `before`."""
    return int((mark(shape, after) & ~mark(shape, before)).sum()) * 4


def owned(metadata: Sequence[ShardMetadata], rank: int) -> list[Region]:
    return [shard.region for shard in metadata if shard.placement is not None and shard.placement.rank() == rank]


def same_bytes(one: torch.Tensor, other: torch.Tensor) -> bool:
    return one.shape == other.shape and torch.equal(
        one.contiguous().flatten().view(torch.uint8), other.contiguous().flatten().view(torch.uint8)
    )


def refused(step: Callable[[], object], kind: type[Exception]) -> str:
    with pytest.raises(kind) as caught:
        step()
    return str(caught.value)


@given(st.lists(some_layouts, min_size=8, max_size=8))
def test_a_dtensor_converted_to_shards_and_back_shares_memory(cases: list[Layout]) -> None:
    def work() -> None:
        for layout in cases:
            whole, rank = values(layout.shape), comm.rank()
            x = sw.distribute_tensor(whole, layout.mesh, layout.placements, order=layout.order)
            with comm.count() as traffic:
                made = sharded.from_dtensor(x)
            assert traffic.calls.total() == 0
            mine = layout.region(rank)
            first = next((ranks[0] for region, ranks in layout.regions() if region == mine), None)
            assert [shard.metadata.region for shard in made.local_shards()] == [mine] * (first == rank)
            for shard in made.local_shards():
                assert shard.tensor.data_ptr() == x.to_local().data_ptr()
            gathered = made.gather()
            assert rank != 0 or torch.equal(gathered, whole)

            with comm.count() as traffic:
                back = sharded.to_dtensor(made)  # its spec knows mesh, placements and order
            assert back.sharding is layout
            assert traffic.bytes == lacking(layout.shape, owned(made.shards_metadata(), rank), [mine])
            if len(layout.replicas(rank)) == 1:
                assert traffic.calls.total() == 0
                assert mine.is_empty or back.to_local().data_ptr() == x.to_local().data_ptr()
            assert torch.equal(back.full_tensor(), whole)

    run_ranks(4, work)


@given(st.lists(st.tuples(cut_layouts, st.integers(0, 10**6)), min_size=8, max_size=8))
def test_any_sharding_converts_to_any_layout_and_back(cases: list[tuple[Layout, int]]) -> None:
    def work() -> None:
        for layout, seed in cases:
            whole, rank = values(layout.shape), comm.rank()
            spec = EnumerableShardingSpec(random_tiling(random.Random(seed), layout.shape, 4))
            mine, region = owned(spec.shards, rank), layout.region(rank)
            made = spec.shard(whole)
            with comm.count() as traffic:
                x = sharded.to_dtensor(made, layout.mesh, layout.placements, layout.order)
            assert x.sharding is layout
            assert torch.equal(x.to_local(), whole[region.slices()])
            assert traffic.bytes == lacking(layout.shape, mine, [region])

            with comm.count() as traffic:
                back = sharded.from_dtensor(x, spec)
            assert back.shards_metadata() == spec.shards
            for shard in back.local_shards():
                assert torch.equal(shard.tensor, whole[shard.metadata.region.slices()])
            # A replica of its own serves a rank as well as the owner's.
            assert traffic.bytes == lacking(layout.shape, [region], mine)

    run_ranks(4, work)


@given(layouts(shapes(max_dims=3), meshes(max_size=8), partial=False), layouts(mesh=meshes(max_size=8), partial=False))
def test_every_rank_plans_its_part_of_the_same_transfers_from_replicas(layout: Layout, other: Layout) -> None:
    source = layout.table()
    target = Layout(other.mesh, [Replicate()] * other.mesh.ndim, layout.shape).table()
    every = sharded.plan_transfer(source, target)
    rows = list(zip(*(column.tolist() for column in every), strict=True))
    assert len({(row[1], tuple(row[4])) for row in rows}) == len(rows), "a box comes twice"
    for rank in {*source.ranks.tolist(), *target.ranks.tolist()}:
        own = list(
            zip(*(column.tolist() for column in sharded.plan_transfer_for_rank(source, target, rank)), strict=True)
        )
        assert own == [row for row in rows if rank in row[2:4]]
        held = [layout.region(rank)] if rank in layout.mesh else []
        wanted = [Region.whole(layout.shape)] if rank in other.mesh else []
        assert every.received(rank, 4) == lacking(layout.shape, held, wanted)


def test_replicas_serve_receivers_in_turn() -> None:
    source = Layout(Mesh((4,)), [Replicate()], (6,)).table()
    target = Layout(Mesh((8,)), [Replicate()], (6,)).table()
    moves = sharded.plan_transfer(source, target)
    away = moves.senders != moves.receivers
    assert sorted(moves.senders[away].tolist()) == [0, 1, 2, 3]


def test_placements_are_inferred_from_the_shards() -> None:
    def work() -> None:
        def placements(spec: sharded.ShardingSpec, *size: int) -> tuple[object, ...]:
            made = sharded.rand(spec, *size)
            with comm.count() as traffic:
                x = sharded.to_dtensor(made)
            assert traffic.calls.total() == 0
            for shard in made.local_shards():
                assert not shard.tensor.numel() or shard.tensor.data_ptr() == x.to_local().data_ptr()
            return x.placements

        def slabs(dim: int, *lengths: tuple[int, int]) -> EnumerableShardingSpec:
            shards, start = [], 0
            for rank, length in lengths:
                offsets, sizes = [0, 0], [6, 6]
                offsets[dim], sizes[dim] = start, length
                shards.append(ShardMetadata(offsets, sizes, f"rank:{rank}/cpu"))
                start += length
            return EnumerableShardingSpec(shards)

        assert placements(ChunkShardingSpec(0, FOUR), 6, 6) == (Shard(0),)
        assert placements(ChunkShardingSpec(-1, FOUR), 5, 3) == (Shard(1),)
        assert placements(ChunkShardingSpec(0, FOUR[:2]), 6, 6) == (Ragged(0, [3, 3, 0, 0]),)
        assert placements(slabs(1, (0, 1), (2, 2), (3, 3)), 6, 6) == (Ragged(1, [1, 0, 2, 3]),)
        assert placements(slabs(0, (0, 2), (1, 0), (3, 4)), 6, 6) == (Ragged(0, [2, 0, 0, 4]),)

        swapped = sharded.rand(slabs(0, (1, 3), (0, 3)), 6, 6)
        said = refused(lambda: sharded.to_dtensor(swapped), PlacementError)
        assert "the 2 shards of a tensor of size [6, 6]" in said
        assert "pass placements" in said
        in_their_order = Mesh((4,), ranks=[1, 0, 2, 3])
        assert sharded.to_dtensor(swapped, in_their_order).placements == (Ragged(0, [3, 3, 0, 0]),)
        two = sharded.rand(slabs(0, (0, 3), (0, 3)), 6, 6)
        refused(lambda: sharded.to_dtensor(two), PlacementError)
        refused(lambda: sharded.to_dtensor(two, Mesh((2, 2))), PlacementError)

    run_ranks(4, work)


def test_every_dtype_is_converted() -> None:
    def work() -> None:
        for dtype in (torch.int64, torch.bool, torch.bfloat16, torch.complex64, torch.float8_e4m3fn, torch.uint16):
            whole = (values((5, 3)) % 2).to(dtype)
            made = ChunkShardingSpec(0, FOUR).shard(whole)
            for placement in (Shard(0), Shard(1), Replicate()):
                x = sharded.to_dtensor(made, Mesh((4,)), [placement])
                assert x.dtype == dtype
                region = x.sharding.region(comm.rank())
                assert same_bytes(x.to_local(), whole[region.slices()])
                back = sharded.from_dtensor(x, ChunkShardingSpec(1, FOUR[1:]))
                assert back.dtype == dtype
                for shard in back.local_shards():
                    assert same_bytes(shard.tensor, whole[shard.metadata.region.slices()])

    run_ranks(4, work)


SCATTERED = [
    ShardMetadata([0, 0], [2, 6], "rank:1/cpu"),
    ShardMetadata([2, 0], [3, 2], "rank:0/cpu"),
    ShardMetadata([2, 2], [3, 4], "rank:1/cpu"),
]


@pytest.mark.parametrize("shards", [None, SCATTERED], ids=["agreeing", "scattered, none on two ranks"])
def test_gradients_of_the_dtensor_reach_the_shards_once(shards: list[ShardMetadata] | None) -> None:
    whole, weight = torch.randn(5, 6), torch.randn(5, 6)
    plain = whole.clone().requires_grad_()
    (expected,) = torch.autograd.grad((plain**3 * weight).sum(), plain)

    def work() -> None:
        spec = ChunkShardingSpec(0, FOUR) if shards is None else EnumerableShardingSpec(shards)
        for mesh, placements in [
            (Mesh((4,)), [Shard(0)]),
            (Mesh((4,)), [Shard(1)]),
            (Mesh((4,)), [Replicate()]),
            (Mesh((2, 2)), [Replicate(), Shard(1)]),
            (Mesh((2, 2)), [Shard(0), Shard(0)]),
        ]:
            made = spec.shard(whole).requires_grad_()
            x = sharded.to_dtensor(made, mesh, placements)
            assert x.requires_grad
            w = sw.distribute_tensor(weight, mesh, placements)
            loss = (x**3 * w).sum()
            with comm.count() as traffic:
                loss.backward()
            for shard in made.local_shards():
                assert shard.tensor.grad is not None
                torch.testing.assert_close(shard.tensor.grad, expected[shard.metadata.region.slices()])
            if placements == [Replicate()]:
                assert traffic.bytes == 0  # each rank already has the full gradient

    run_ranks(4, work)


def test_conversions_are_twice_differentiable() -> None:
    whole = torch.rand(5, 4, dtype=torch.float64) + 1

    def work() -> None:
        for placements in ([Shard(1)], [Replicate()], [Shard(0)]):
            made = ChunkShardingSpec(0, FOUR).shard(whole).requires_grad_()
            tensors = [shard.tensor for shard in made.local_shards()]
            x = sharded.to_dtensor(made, Mesh((4,)), placements)
            first = torch.autograd.grad((x**3).sum(), tensors, create_graph=True)
            # Gradients from another rank's loss reach a shard through the transfer.
            torch.stack([(one**2).sum() for one in first]).sum().backward()
            for shard in made.local_shards():
                part = whole[shard.metadata.region.slices()]
                assert shard.tensor.grad is not None
                torch.testing.assert_close(shard.tensor.grad, 36 * part**3)

    run_ranks(4, work)


def test_gradients_of_the_shards_reach_the_dtensor() -> None:
    weight = torch.randn(5, 8)

    def work() -> None:
        def check(x: sw.DTensor, made: sharded.ShardedTensor) -> None:
            assert made.requires_grad
            assert not made.is_leaf
            losses = [(s.tensor**2 * weight[s.metadata.region.slices()]).sum() for s in made.local_shards()]
            torch.stack(losses).sum().backward()
            assert x.grad is not None
            assert x.grad.sharding is x.sharding
            torch.testing.assert_close(x.grad.to_local(), (2 * weight)[x.sharding.region(comm.rank()).slices()])

        def leaf(*placements: sw.Placement) -> sw.DTensor:
            mesh = Mesh((4,)) if len(placements) == 1 else Mesh((2, 2))
            return sw.distribute_tensor(torch.ones(5, 8), mesh, placements).requires_grad_()

        for placements in ([Shard(1)], [Shard(0), Shard(1)]):
            check(x := leaf(*placements), sharded.from_dtensor(x))
        for placements in ([Shard(1)], [Replicate()], [Replicate(), Shard(0)]):
            check(x := leaf(*placements), sharded.from_dtensor(x, ChunkShardingSpec(1, FOUR)))

        # Three of four replicas would get no gradient: an error.
        x = leaf(Replicate())
        assert "ranks [1, 2, 3]" in refused(lambda: sharded.from_dtensor(x), UnsupportedError)
        made = sharded.from_dtensor(x.detach())
        assert not made.requires_grad
        assert made.is_leaf
        with torch.no_grad():
            assert not sharded.from_dtensor(x).requires_grad

    run_ranks(4, work)


def test_gradients_reach_ranks_that_held_no_shards() -> None:
    whole, weight = torch.randn(6, 2), torch.randn(6, 2)

    def work() -> None:
        leaf = ChunkShardingSpec(0, FOUR[:2]).shard(whole).requires_grad_()
        made = leaf.clone().reshard(ChunkShardingSpec(1, [*FOUR, *FOUR]))
        losses = [(s.tensor * weight[s.metadata.region.slices()]).sum() for s in made.local_shards()]
        torch.stack(losses).sum().backward()
        for shard in leaf.local_shards():
            assert shard.tensor.grad is not None
            torch.testing.assert_close(shard.tensor.grad, weight[shard.metadata.region.slices()])

    run_ranks(4, work)


def test_partial_values_are_reduced_before_conversion() -> None:
    def work() -> None:
        for mesh, placements, size in [
            (Mesh((4,)), [Partial()], (5, 3)),
            (Mesh((4,)), [Partial("max")], (3, 5)),
            (Mesh((2, 2)), [Partial(), Ragged(0, [4, 1])], (5, 3)),
            (Mesh((2, 2)), [Partial("avg"), Replicate()], ()),
        ]:
            layout = Layout(mesh, placements, size)
            local = torch.full(layout.local_shape(comm.rank()), float(comm.rank()))
            x = sw.DTensor.from_local(local, mesh, placements, shape=size)
            whole = x.full_tensor()
            made = sharded.from_dtensor(x)
            for shard in made.local_shards():
                assert torch.equal(shard.tensor, whole[shard.metadata.region.slices()])
            if placements == [Partial()]:
                assert [shard.shard_sizes for shard in made.shards_metadata()] == [[2, 3], [2, 3], [1, 3]]

    run_ranks(4, work)


def test_mesh_and_group_may_have_different_ranks() -> None:
    whole = values((6, 4))

    def work() -> None:
        rank = comm.rank()
        # A tensor of all ranks, a mesh of two: the others hold an empty part.
        made = ChunkShardingSpec(0, FOUR).shard(whole).requires_grad_()
        x = sharded.to_dtensor(made, Mesh((2,), ranks=[1, 3]), [Shard(1)])
        assert torch.equal(
            x.to_local(), whole[x.sharding.region(rank).slices()] if rank in (1, 3) else torch.empty(0, 0)
        )
        x.to_local().sum().backward()
        for shard in made.local_shards():
            assert shard.tensor.grad is not None
            assert torch.equal(shard.tensor.grad, torch.ones_like(shard.tensor))

        # A tensor of two ranks, a mesh of four: those outside the group know its metadata.
        spec = ChunkShardingSpec(0, FOUR[1:3])
        known: sharded.ShardedTensor | sharded.ShardedTensorMetadata
        known = spec.build_metadata(whole.size(), sharded.TensorProperties())
        if rank in (1, 2):
            known = spec.shard(whole, src_rank=1, process_group=comm.subgroup([1, 2]))
        x = sharded.to_dtensor(known, Mesh((4,)), [Shard(1)])
        assert torch.equal(x.full_tensor(), whole)

        # And back, on the ranks of the mesh alone, or with others that the spec names.
        small = Mesh((2,), ranks=[0, 2])
        y = sw.distribute_tensor(whole, small, [Shard(0)])
        if rank in (0, 2):
            made = sharded.from_dtensor(y)
            assert made._group.ranks == (0, 2)
            gathered = made.gather(dst=2)
            assert rank != 2 or torch.equal(gathered, whole)
        else:
            assert f"rank {rank} is not in" in refused(lambda: sharded.from_dtensor(y), PlacementError)
        moved = sharded.from_dtensor(y, ChunkShardingSpec(1, FOUR))
        assert torch.equal(moved.local_tensor(), whole[:, rank : rank + 1])
        everyone = sharded.from_dtensor(y, process_group=comm.world())
        assert everyone._group is comm.world()

    run_ranks(4, work)


def test_invalid_conversions_raise_the_same_error_on_all_ranks() -> None:
    def work() -> list[str]:
        made = sharded.rand(ChunkShardingSpec(0, FOUR), 6, 4)
        x = sw.distribute_tensor(torch.ones(6, 4), Mesh((4,)), [Shard(0)])
        other = [Shard(1)] if comm.rank() == 2 else [Replicate()]
        elsewhere = ChunkShardingSpec(0, ["rank:0/cpu", "rank:9/cpu"])
        few = sw.distribute_tensor(torch.ones(6, 4), Mesh((2,)), [Shard(0)])
        return [
            refused(lambda: sharded.to_dtensor(torch.ones(2)), ArgumentTypeError),  # type: ignore[arg-type]  # the mistake
            refused(lambda: sharded.from_dtensor(torch.ones(2)), ArgumentTypeError),  # type: ignore[arg-type]  # likewise
            refused(lambda: sharded.to_dtensor(made, Mesh((4,)), [Partial()]), PlacementError),
            refused(lambda: sharded.to_dtensor(made, Mesh((4,)), [Shard(2)]), PlacementError),
            refused(lambda: sharded.to_dtensor(made, Mesh((6,)), [Shard(0)]), MeshError),
            refused(lambda: sharded.to_dtensor(made, Mesh((4,)), other), DisagreementError),
            refused(lambda: sharded.from_dtensor(x, elsewhere), ShardwrightError),
            refused(
                lambda: sharded.from_dtensor(x, ChunkShardingSpec(0 if comm.rank() else 1, FOUR[:1] * 2)),
                DisagreementError,
            ),
            refused(lambda: sharded.from_dtensor(few, process_group=comm.subgroup([comm.rank()])), PlacementError)
            if comm.rank() < 2
            else "",
        ]

    first, second, *_ = run_ranks(4, work)
    assert first[:-1] == second[:-1]
    assert "ranks [4, 5] of Mesh(6) are not in the world of 4 ranks" in first[4]
    assert "is partial" in first[2]
    assert "ranks disagree" in first[5]
    assert "rank 9" in first[6]
    assert "ranks [1] hold parts of" in first[-1]


def test_only_non_contiguous_local_tensors_are_copied() -> None:
    def work() -> None:
        whole = values((6, 4))
        x = sw.distribute_tensor(whole, Mesh((4,)), [Shard(0)])
        turned = sharded.from_dtensor(x.t())
        for shard in turned.local_shards():
            assert shard.tensor.is_contiguous()
            assert torch.equal(shard.tensor, whole.t()[shard.metadata.region.slices()])
        made = sharded.from_dtensor(x)
        for shard in made.local_shards():
            shard.tensor.fill_(7)
        assert torch.equal(x.full_tensor(), torch.full((6, 4), 7.0))

    run_ranks(4, work)


def test_a_single_process_needs_no_set_up() -> None:
    made = sharded.ones(ChunkShardingSpec(0, ["rank:0/cpu"] * 2), 4)
    x = sharded.to_dtensor(made, Mesh((1,)), [Replicate()])
    assert torch.equal(x.to_local(), torch.ones(4))
    scalar = sharded.to_dtensor(sharded.full(EnumerableShardingSpec([ShardMetadata([], [], "rank:0/cpu")]), (), 3.0))
    assert scalar.placements == (Replicate(),)
    assert scalar.item() == 3.0
    nothing = sharded.from_dtensor(sw.distribute_tensor(torch.ones(0, 3), Mesh((1,)), [Shard(0)]))
    assert nothing.shards_metadata() == []
    assert sharded.to_dtensor(nothing).shape == (0, 3)
