"""PyTorch's ShardedTensors convert to ours and back: the same memory, the same boxes, no communication."""

from __future__ import annotations

import random
import warnings
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
import torch.distributed as dist
from torch.distributed._shard import sharded_tensor as theirs
from torch.distributed._shard.metadata import ShardMetadata as TheirShardMetadata
from torch.distributed._shard.sharded_tensor.metadata import ShardedTensorMetadata as TheirMetadata
from torch.distributed._shard.sharded_tensor.metadata import TensorProperties as TheirProperties
from torch.distributed._shard.sharding_spec import ChunkShardingSpec as TheirChunks
from torch.distributed._shard.sharding_spec import EnumerableShardingSpec as TheirList
from torch.distributed.remote_device import _remote_device

import shardwright as sw
from shardwright import comm, sharded
from shardwright.errors import ArgumentTypeError, TilingError, UnsupportedError
from shardwright.interop import (
    from_torch_metadata,
    from_torch_sharded_tensor,
    from_torch_spec,
    to_torch_metadata,
    to_torch_sharded_tensor,
    to_torch_spec,
)
from shardwright.layout import Mesh
from shardwright.sharded import ChunkShardingSpec, EnumerableShardingSpec, ShardMetadata
from shardwright.testing import run_ranks

FOUR = ["rank:0/cpu", "rank:1/cpu", "rank:2/cpu", "rank:3/cpu"]


@contextmanager
def deprecated() -> Iterator[None]:
    """PyTorch warns that its ShardedTensor is going away, and of empty shards."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def gathered(tensor: theirs.ShardedTensor, dst: int = 0) -> torch.Tensor | None:
    """What PyTorch's own gather gives, on that rank."""
    out = torch.empty(tensor.metadata().size, dtype=tensor.metadata().tensor_properties.dtype)
    here = comm.rank() == dst
    with deprecated():
        tensor.gather(dst, out if here else None)
    return out if here else None


def test_pytorchs_chunks_are_converted_without_copying() -> None:
    def work() -> None:
        rank = comm.rank()
        for dim, placements, size in [
            (0, FOUR, (8, 3)),
            (0, FOUR, (6, 3)),  # nothing for the last
            (0, FOUR, (5, 3)),  # uneven, too, and PyTorch's own gather stumbles over the last
            (1, FOUR[::-1], (2, 6)),
            (-1, FOUR[1:3], (4, 5)),  # none on two ranks
        ]:
            with deprecated():
                made = theirs.zeros(TheirChunks(dim, placements), *size)
            whole = torch.arange(float(torch.Size(size).numel())).reshape(size)
            for shard in made.local_shards():
                start, length = shard.metadata.shard_offsets[dim], shard.metadata.shard_sizes[dim]
                shard.tensor.copy_(whole.narrow(dim, start if length else 0, length))
            with comm.count() as traffic:
                ours = from_torch_sharded_tensor(made)
            assert traffic.calls.total() == 0
            assert ours.sharding_spec() == ChunkShardingSpec(dim, placements)
            assert tuple(ours.shape) == size
            assert [s.tensor.data_ptr() for s in ours.local_shards()] == [
                s.tensor.data_ptr() for s in made.local_shards()
            ]
            mine = ours.gather()
            assert rank != 0 or torch.equal(mine, whole)

            back = to_torch_sharded_tensor(ours)
            assert type(back) is theirs.ShardedTensor
            assert back.metadata() == made.metadata()
            assert back.sharding_spec() == made.sharding_spec()
            assert [s.tensor.data_ptr() for s in back.local_shards()] == [
                s.tensor.data_ptr() for s in made.local_shards()
            ]
            if size != (5, 3):
                again = gathered(back)
                assert rank != 0 or torch.equal(again, whole)
            # A reshard of ours works on what was PyTorch's.
            moved = ours.reshard(ChunkShardingSpec(0, FOUR[::-1])).gather()
            assert rank != 0 or torch.equal(moved, whole)

    run_ranks(4, work)


def test_pytorchs_local_shards_are_converted_for_any_boxes() -> None:
    def work() -> None:
        rank = comm.rank()
        # Two boxes on ranks 0 and 1, one on rank 3, none on rank 2.
        boxes = {0: [(0, 0), (4, 3)], 1: [(0, 3), (4, 0)], 3: [(2, 0)]}.get(rank, [])
        sizes = {(0, 0): (2, 3), (0, 3): (2, 3), (4, 0): (2, 3), (4, 3): (2, 3), (2, 0): (2, 6)}
        for needs in (False, True):
            local = [
                theirs.Shard.from_tensor_and_offsets(
                    torch.full(sizes[at], rank + 1.0, requires_grad=needs), list(at), rank
                )
                for at in boxes
            ]
            with deprecated():
                made = theirs.init_from_local_shards(local, 6, 6)
                whole = gathered(made)
            ours = from_torch_sharded_tensor(made)
            assert ours.requires_grad is needs
            assert ours.is_leaf
            assert sorted(str(s.metadata.region) for s in ours.local_shards()) == sorted(
                f"[{r}:{r + sizes[r, c][0]}, {c}:{c + sizes[r, c][1]}]" for r, c in boxes
            )
            mine = ours.gather()
            assert rank != 0 or torch.equal(mine, whole)
            back = to_torch_sharded_tensor(ours)
            assert back.metadata().tensor_properties == made.metadata().tensor_properties
            assert back.metadata().shards_metadata == made.metadata().shards_metadata
            assert back._process_group is made._process_group
            for shard in back.local_shards():
                if needs:
                    (shard.tensor * 2).sum().backward()
            for shard in local if needs else []:
                assert torch.equal(shard.tensor.grad, torch.full_like(shard.tensor, 2.0))

    run_ranks(4, work)


def test_random_boxes_and_user_specs_round_trip() -> None:
    def work() -> None:
        rank = comm.rank()
        rng = random.Random(4)
        specs: list[sharded.ShardingSpec] = [
            sharded.LayoutShardingSpec(Mesh((2, 2)), [sw.Shard(0), sw.Shard(1)]),
            sharded.LayoutShardingSpec(Mesh((2, 2)), [sw.Shard(0), sw.Shard(0)], order=(1, 0)),
        ]
        for _ in range(20):
            marks = sorted(rng.choices(range(8), k=3))
            lengths = [b - a for a, b in zip([0, *marks], [*marks, 7], strict=True)]
            starts = [0, *marks]
            shards = [
                ShardMetadata([start, 0], [length, 5], f"rank:{rng.randrange(4)}/cpu")
                for start, length in zip(starts, lengths, strict=True)
            ]
            rng.shuffle(shards)
            specs.append(EnumerableShardingSpec(shards))
        for spec in specs:
            whole = torch.arange(35.0).reshape(7, 5)
            ours = spec.shard(whole)
            with comm.count() as traffic:
                made = to_torch_sharded_tensor(ours)
            assert traffic.calls.total() == 0
            assert isinstance(made.sharding_spec(), TheirList)
            assert [s.tensor.data_ptr() for s in made.local_shards()] == [
                s.tensor.data_ptr() for s in ours.local_shards()
            ]
            got = gathered(made)
            assert rank != 0 or torch.equal(got, whole)
            back = from_torch_sharded_tensor(made)
            full = [s for s in ours.shards_metadata() if not s.region.is_empty]
            assert [s for s in back.shards_metadata() if not s.region.is_empty] == full
            again = back.gather()
            assert rank != 0 or torch.equal(again, whole)

    run_ranks(4, work)


def test_a_subgroup_is_kept() -> None:
    def work() -> None:
        pair = dist.new_group([1, 3])
        if comm.rank() not in (1, 3):
            return
        with deprecated():
            made = theirs.ones(TheirChunks(0, ["rank:1/cpu", "rank:3/cpu"]), 5, process_group=pair)
        ours = from_torch_sharded_tensor(made)
        assert ours._process_group is pair
        assert to_torch_sharded_tensor(ours)._process_group is pair
        got = ours.gather(dst=3)
        assert comm.rank() != 3 or torch.equal(got, torch.ones(5))
        other = dist.new_group([1, 3], use_local_synchronization=True)
        assert to_torch_sharded_tensor(ours, other)._process_group is other

    run_ranks(4, work)


def test_metadata_and_specs_are_converted_both_ways() -> None:
    shard = ShardMetadata([0, 4], [2, 4], "rank:1/cuda:0")
    there = to_torch_metadata(shard)
    assert there == TheirShardMetadata([0, 4], [2, 4], "rank:1/cuda:0")
    assert there.placement == _remote_device("rank:1/cuda:0")
    assert from_torch_metadata(there) == shard
    assert from_torch_metadata(TheirShardMetadata([0], [4])) == ShardMetadata([0], [4])
    assert to_torch_metadata(ShardMetadata([0], [4])).placement is None
    worker = ShardMetadata([0], [4], "trainer0/cpu")
    assert to_torch_metadata(worker).placement.worker_name() == "trainer0"
    assert from_torch_metadata(to_torch_metadata(worker)) == worker

    ours = sharded.TensorProperties(torch.bfloat16, requires_grad=True, memory_format=torch.channels_last)
    its = to_torch_metadata(ours)
    assert its == TheirProperties(torch.bfloat16, torch.strided, True, torch.channels_last, False)
    assert from_torch_metadata(its) == ours

    halves = [ShardMetadata([0], [3], "rank:0/cpu"), ShardMetadata([3], [2], "rank:1/cpu")]
    whole = sharded.ShardedTensorMetadata(halves, torch.Size([5]), ours)
    assert isinstance(to_torch_metadata(whole), TheirMetadata)
    assert from_torch_metadata(to_torch_metadata(whole)) == whole
    beyond = TheirChunks(0, FOUR).build_metadata(torch.Size([5]), TheirProperties())
    from_torch_metadata(beyond).validate()  # PyTorch says that the fourth chunk, which is empty, starts at 6 of 5

    chunks, listed = ChunkShardingSpec(-1, FOUR), EnumerableShardingSpec(halves)
    assert to_torch_spec(chunks) == TheirChunks(-1, FOUR)
    assert from_torch_spec(to_torch_spec(chunks)) == chunks
    assert to_torch_spec(listed) == TheirList([to_torch_metadata(half) for half in halves])
    assert from_torch_spec(to_torch_spec(listed)) == listed
    rows = to_torch_spec(sharded.LayoutShardingSpec(Mesh((2,)), [sw.Shard(0)]), (5,))
    assert rows == to_torch_spec(listed)


def test_invalid_conversions_raise_with_the_reason() -> None:
    class Mine(sharded.ShardingSpec):
        def build_metadata(
            self, tensor_sizes: torch.Size, tensor_properties: sharded.TensorProperties
        ) -> sharded.ShardedTensorMetadata:
            raise NotImplementedError

    with pytest.raises(ArgumentTypeError, match="pass the size of the tensor"):
        to_torch_spec(Mine())
    for wrong in (to_torch_sharded_tensor, from_torch_sharded_tensor, to_torch_metadata, from_torch_metadata):
        with pytest.raises(ArgumentTypeError, match="got Tensor"):
            wrong(torch.ones(2))
    with pytest.raises(ArgumentTypeError, match="cannot convert Mine"):
        from_torch_spec(Mine())

    def work() -> None:
        images = sharded.empty(ChunkShardingSpec(0, FOUR), 4, 3, 2, 2, memory_format=torch.channels_last)
        with pytest.raises(UnsupportedError, match="contiguous"):
            to_torch_sharded_tensor(images)
        nothing = sharded.from_dtensor(sw.distribute_tensor(torch.ones(0, 3), Mesh((4,)), [sw.Shard(0)]))
        with pytest.raises(UnsupportedError, match="has no shards"):
            to_torch_sharded_tensor(nothing)
        # PyTorch trusts metadata that leaves a gap; we look.
        with deprecated():
            made = theirs.ones(TheirChunks(0, FOUR), 8)
        made.metadata().shards_metadata.pop()
        with pytest.raises(TilingError, match="gap"):
            from_torch_sharded_tensor(made)

    run_ranks(4, work)
