"""`gather` returns the global tensor on one rank: new or into a buffer, with another dtype, over a subgroup."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from shardwright import comm, sharded
from shardwright.sharded import ChunkShardingSpec, EnumerableShardingSpec, Shard, ShardMetadata
from shardwright.testing import run_ranks

WHOLE = torch.arange(40.0).reshape(8, 5)


def place(*ranks: int) -> list[str]:
    return [f"rank:{rank}/cpu" for rank in ranks]


def test_gather_honours_dst_out_and_dtype() -> None:
    def work() -> None:
        rank = comm.world().rank
        made = ChunkShardingSpec(1, place(3, 1, 1)).shard(WHOLE)
        for dst in range(4):
            whole = made.gather(dst)
            assert whole is None if rank != dst else torch.equal(whole, WHOLE)

        def out(like: torch.Tensor) -> torch.Tensor | None:
            return like if rank == 2 else None

        plain = torch.full((8, 5), -1.0)
        strided = torch.full((5, 16), -1.0).T[::2]
        other = torch.full((8, 5), -1, dtype=torch.int32)
        negated = torch.full((8, 5), -1.0, dtype=torch.complex64)
        for buffer in (plain, strided, other):
            address = buffer.data_ptr()
            filled = made.gather(2, out=out(buffer))
            if rank == 2:
                assert filled is buffer
                assert buffer.data_ptr() == address
                assert torch.equal(buffer.float(), WHOLE)
        assert made.gather(2, out(plain), enforce_dtype=True) is out(plain)
        complex_made = ChunkShardingSpec(0, place(0, 1)).shard(torch.complex(WHOLE, WHOLE))
        filled = complex_made.gather(2, out=out(negated.conj()))
        assert rank != 2 or torch.equal(filled, torch.complex(WHOLE, WHOLE))
        whole = made.gather(1, dtype=torch.float64)
        assert whole is None if rank != 1 else torch.equal(whole, WHOLE.double())
        whole = made.gather(2, out=out(other), dtype=torch.int32)
        assert rank != 2 or (whole is other and torch.equal(other, WHOLE.int()))

    run_ranks(4, work)


def test_gather_is_not_differentiable_and_accepts_parameters() -> None:
    made = ChunkShardingSpec(0, ["rank:0/cpu"] * 2).shard(WHOLE).requires_grad_()
    assert not made.gather().requires_grad
    assert torch.equal(made.gather(), WHOLE)


def test_channels_last_and_conjugate_shards_are_gathered_by_value() -> None:
    pictures = torch.randn(4, 3, 2, 5)
    made = sharded.empty(ChunkShardingSpec(0, ["rank:0/cpu"] * 3), 4, 3, 2, 5, memory_format=torch.channels_last)
    for shard in made.local_shards():
        assert shard.tensor.is_contiguous(memory_format=torch.channels_last)
        shard.tensor.copy_(pictures[shard.metadata.region.slices()])
    assert torch.equal(made.gather(), pictures)
    values = torch.complex(WHOLE, -WHOLE)
    halves = [Shard.from_tensor_and_offsets(values.conj()[rows : rows + 4], [rows, 0]) for rows in (0, 4)]
    assert torch.equal(sharded.init_from_local_shards(halves, 8, 5).gather(), values.conj().resolve_conj())


def test_a_subgroup_uses_global_ranks() -> None:
    def work() -> Any:
        rank = comm.world().rank
        group = dist.new_group([1, 3])
        if rank not in (1, 3):
            return None
        spec = ChunkShardingSpec(0, place(3, 1, 3))
        made = spec.shard(WHOLE if rank == 3 else torch.zeros(8, 5), src_rank=3, process_group=group)
        assert [shard.metadata.shard_offsets[0] for shard in made.local_shards()] == ([3] if rank == 1 else [0, 6])
        for dst in (1, 3):
            whole = made.gather(dst)
            assert whole is None if rank != dst else torch.equal(whole, WHOLE)
        errors = []
        for wrong in (
            lambda: made.gather(0),
            lambda: made.reshard(ChunkShardingSpec(0, place(0, 1))),
            lambda: sharded.zeros(ChunkShardingSpec(0, place(2)), 4, process_group=group),
            lambda: spec.shard(WHOLE, process_group=group),  # the source, rank 0, is not in the group
        ):
            try:
                wrong()
            except ValueError as error:
                errors.append(f"{type(error).__name__}: {error}")
        with comm.count() as traffic:
            made.reshard(ChunkShardingSpec(1, place(1, 3)))
        mine = WHOLE[:, :3] if rank == 1 else WHOLE[:, 3:]
        assert torch.equal(made.local_tensor(), mine)
        held = 3 * 3 if rank == 1 else 5 * 2  # of the new shard, in the old ones
        assert traffic.bytes == 4 * (mine.numel() - held)
        rows = EnumerableShardingSpec([ShardMetadata([0, 0], [8, 5], "rank:3/cpu")])
        assert len(made.reshard(rows).local_shards()) == (rank == 3)
        own = [Shard.from_tensor_and_offsets(torch.full((1, 2), float(rank)), [rank // 2, 0])]
        joined = sharded.init_from_local_shards(own, 2, 2, process_group=group).gather(3)
        assert joined is None if rank == 1 else joined.tolist() == [[1, 1], [3, 3]]
        numbers = sharded.rand(spec, 8, 5, process_group=group)
        assert numbers.size() == (8, 5)
        return errors

    found = run_ranks(4, work)
    assert found[0] is found[2] is None
    assert found[1] == found[3]
    assert [text.split(":")[0] for text in found[1]] == ["PlacementError"] * 4
    assert found[1][0] == "PlacementError: gather: dst 0 is not in the group of ranks [1, 3]"
    assert "rank 0 is not in the group of ranks [1, 3]" in found[1][1]
    assert "rank 2 is not in the group of ranks [1, 3]" in found[1][2]
    assert "src_rank 0 is not in the group of ranks [1, 3]" in found[1][3]
