"""Nested shards are flattened to boxes with global offsets, sharing memory."""

from __future__ import annotations

from collections import OrderedDict
from typing import Any, NamedTuple

import pytest
import torch

import shardwright as sw
from shardwright import comm, sharded
from shardwright.errors import DisagreementError, ShardError, TilingError, UnsupportedError
from shardwright.layout import Mesh, Replicate
from shardwright.sharded import ChunkShardingSpec, Shard, ShardMetadata
from shardwright.testing import run_ranks

WHOLE = torch.arange(48.0).reshape(8, 6)


class Pair(NamedTuple):
    first: Any
    second: Any


def pair_of(rank: int) -> list[int]:
    return [rank // 2 * 2, rank // 2 * 2 + 1]


def shard_at(tensor: torch.Tensor, *offsets: int) -> Shard:
    return Shard.from_tensor_and_offsets(tensor, offsets)


def inner_columns(rows: slice, ranks: list[int]) -> sharded.ShardedTensor:
    """Rows of the global tensor whose columns are sharded over a pair of ranks."""
    spec = ChunkShardingSpec(1, [f"rank:{rank}/cpu" for rank in ranks])
    return spec.shard(WHOLE[rows].clone(), src_rank=ranks[0], process_group=comm.subgroup(ranks))


def boxes(tensor: sharded.ShardedTensor) -> list[tuple[str, str]]:
    return [(str(shard.region), str(shard.placement)) for shard in tensor.shards_metadata()]


GRID = [
    ("[0:4, 0:3]", "rank:0/cpu"),
    ("[0:4, 3:6]", "rank:1/cpu"),
    ("[4:8, 0:3]", "rank:2/cpu"),
    ("[4:8, 3:6]", "rank:3/cpu"),
]


def test_flattening_over_all_ranks_gives_global_offsets_and_owners() -> None:
    def work() -> None:
        rank = comm.rank()
        start = rank // 2 * 4
        inner = inner_columns(slice(start, start + 4), pair_of(rank))
        outer = sharded.init_from_local_shards([shard_at(inner, start, 0)], 8, 6)
        assert len(outer.shards_metadata()) == 2
        with comm.count() as traffic:
            flat = sharded.flatten_sharded_tensors(outer)
        assert traffic.bytes == 0
        assert boxes(flat) == GRID
        assert flat.local_tensor() is inner.local_tensor()
        gathered = flat.gather()
        assert rank != 0 or torch.equal(gathered, WHOLE)
        with pytest.raises(UnsupportedError, match="flatten_sharded_tensors"):
            sharded.to_dtensor(outer, Mesh((4,)), [Replicate()])

    run_ranks(4, work)


def test_flattening_over_rows_of_a_grid_finds_the_ranks_of_all_rows() -> None:
    """As fully sharded training over tensor parallelism has it: neither group knows all ranks."""

    def work() -> None:
        rank = comm.rank()
        start = rank // 2 * 4
        line = comm.subgroup([rank % 2, rank % 2 + 2])
        inner = inner_columns(slice(start, start + 4), pair_of(rank))
        cut = sw.distribute_tensor(WHOLE[start : start + 4], Mesh((2,), ranks=pair_of(rank)), [sw.Shard(1)])
        for part in (inner, cut):
            outer = sharded.init_from_local_shards([shard_at(part, start, 0)], 8, 6, process_group=line)
            flat = sharded.flatten_sharded_tensors(outer)
            assert boxes(flat) == GRID
            assert flat._group.ranks == (0, 1, 2, 3)
            local = part.local_tensor() if part is inner else cut.to_local()
            assert flat.local_tensor().data_ptr() == local.data_ptr()
            gathered = flat.gather(dst=3)
            assert rank != 3 or torch.equal(gathered, WHOLE)

    run_ranks(4, work)


def test_nested_tensors_of_any_depth_are_flattened() -> None:
    def work() -> None:
        rank = comm.rank()
        # Rows 0 to 4 are a tensor of ranks 0 and 1, whose columns 0 to 4 are again one of the same ranks, by rows.
        shards = []
        if rank < 2:
            group = comm.subgroup([0, 1])
            by_rows = ChunkShardingSpec(0, ["rank:1/cpu", "rank:0/cpu"])
            deepest = by_rows.shard(WHOLE[:4, :4].clone(), process_group=group).requires_grad_()
            rest = [shard_at(WHOLE[:4, 4:].clone().requires_grad_(), 0, 4)] if rank == 1 else []
            middle = sharded.init_from_local_shards([shard_at(deepest, 0, 0), *rest], 4, 6, process_group=group)
            shards = [shard_at(middle, 0, 0)]
        elif rank == 3:  # rank 2 holds nothing
            shards = [shard_at(WHOLE[4:].clone().requires_grad_(), 4, 0)]
        outer = sharded.init_from_local_shards(shards, 8, 6)
        flat = sharded.flatten_sharded_tensors([outer])[0]
        assert boxes(flat) == [
            ("[0:2, 0:4]", "rank:1/cpu"),
            ("[0:4, 4:6]", "rank:1/cpu"),
            ("[2:4, 0:4]", "rank:0/cpu"),
            ("[4:8, 0:6]", "rank:3/cpu"),
        ]
        assert flat.requires_grad
        for shard in flat.local_shards():
            assert torch.equal(shard.tensor, WHOLE[shard.metadata.region.slices()])
            shard.tensor.sum().backward()
        if rank < 2:
            assert deepest.local_tensor().grad is not None

    run_ranks(4, work)


def test_the_first_replica_of_an_inner_dtensor_is_the_owner() -> None:
    def work() -> None:
        rank = comm.rank()
        start = rank // 2 * 4
        x = sw.distribute_tensor(WHOLE[start : start + 4], Mesh((2,), ranks=pair_of(rank)), [Replicate()])
        flat = sharded.flatten_sharded_tensors(sharded.init_from_local_shards([shard_at(x, start, 0)], 8, 6))
        assert boxes(flat) == [("[0:4, 0:6]", "rank:0/cpu"), ("[4:8, 0:6]", "rank:2/cpu")]
        assert len(flat.local_shards()) == (rank % 2 == 0)

    run_ranks(4, work)


def test_flattening_keeps_the_structure_of_a_state() -> None:
    inner = ChunkShardingSpec(0, ["rank:0/cpu"] * 2).shard(torch.arange(4.0))
    nested = sharded.init_from_local_shards([Shard.from_tensor_and_offsets(inner, [0])], 4)
    flat = ChunkShardingSpec(0, ["rank:0/cpu"]).shard(torch.ones(2))
    plain = torch.ones(3)
    state = OrderedDict(
        model={"w": nested, "b": plain, "flat": flat},
        untouched={"deep": [flat, (plain, 1)]},
        pairs=[Pair(nested, "text"), (nested,), 5],
    )
    made = sharded.flatten_sharded_tensors(state)
    assert type(made) is OrderedDict
    assert list(made) == list(state)
    assert made["untouched"] is state["untouched"]
    assert made["model"]["b"] is plain
    assert made["model"]["flat"] is flat
    pair = made["pairs"][0]
    assert type(pair) is Pair
    assert pair.second == "text"
    for found in (made["model"]["w"], pair.first, made["pairs"][1][0]):
        assert boxes(found) == [("[0:2]", "rank:0/cpu"), ("[2:4]", "rank:0/cpu")]
        assert [s.tensor.data_ptr() for s in found.local_shards()] == [
            s.tensor.data_ptr() for s in inner.local_shards()
        ]
    assert state["model"]["w"] is nested, "the state itself is not changed"
    assert sharded.flatten_sharded_tensors(made) is made


def test_inconsistent_nested_tensors_raise_on_all_ranks() -> None:
    def work() -> list[str]:
        rank = comm.rank()
        said = []

        def flatten(state: Any, kind: type[Exception]) -> None:
            with pytest.raises(kind) as caught:
                sharded.flatten_sharded_tensors(state)
            said.append(str(caught.value))

        # All four hold the outer box, but two pairs shard it differently: their boxes overlap.
        pair = pair_of(rank)
        spec = ChunkShardingSpec(rank // 2, [f"rank:{one}/cpu" for one in pair])
        inner = spec.shard(WHOLE.clone(), src_rank=pair[0], process_group=comm.subgroup(pair))
        flatten({"w": sharded.init_from_local_shards([shard_at(inner, 0, 0)], 8, 6)}, TilingError)

        # A tensor that some ranks lack.
        made = sharded.rand(ChunkShardingSpec(0, ["rank:0/cpu"]), 4)
        flatten({"w": made, "v": made} if rank else {"w": made, "x": made}, DisagreementError)

        # An error within an inner group is raised on the ranks outside it, too.
        shards = []
        if rank < 2:
            spec = ChunkShardingSpec(rank, ["rank:0/cpu", "rank:1/cpu"])
            alone = spec.build_metadata(torch.Size([8, 6]), sharded.TensorProperties())
            own = [ShardMetadata(s.shard_offsets, s.shard_sizes, s.placement) for s in alone.shards_metadata][rank]
            tensor = sharded.ShardedTensor._init_from_local_shards_and_global_metadata(
                [Shard(torch.ones(own.shard_sizes), own)], alone, comm.subgroup([0, 1])
            )
            middle = sharded.init_from_local_shards([shard_at(tensor, 0, 0)], 8, 6, process_group=comm.subgroup([0, 1]))
            shards = [shard_at(middle, 0, 0)]
        flatten({"w": sharded.init_from_local_shards(shards, 8, 6)}, ShardError)
        return said

    answers = run_ranks(4, work)
    overlap, lacking, inside = answers[0]
    assert all(answer[0] == overlap and answer[2] == inside for answer in answers)
    assert overlap.startswith(
        "state['w']: its shards, including those of nested tensors, do not tile it: overlap: shard"
    )
    assert "rank:0/cpu" in overlap
    assert "[0:4, 0:3]" in overlap
    assert "ranks [1, 2, 3] have no such ShardedTensor" in lacking
    assert "rank 0, shard [0:8, 0:6]" in inside
    assert "overlap" in inside


def test_nested_shards_are_validated_like_others() -> None:
    inner = ChunkShardingSpec(0, ["rank:0/cpu"] * 2).shard(torch.arange(4.0))
    with pytest.raises(ShardError, match=r"dtype is torch\.int64, but torch\.float32 in shard 0"):
        sharded.init_from_local_shards(
            [Shard.from_tensor_and_offsets(inner, [0]), Shard.from_tensor_and_offsets(torch.arange(3), [4])], 7
        )
    with pytest.raises(TilingError, match="gap"):
        sharded.init_from_local_shards([Shard.from_tensor_and_offsets(inner, [0])], 7)
    with pytest.raises(TilingError, match="overlap"):
        sharded.init_from_local_shards(
            [Shard.from_tensor_and_offsets(inner, [0]), Shard.from_tensor_and_offsets(torch.ones(4), [0])], 4
        )
