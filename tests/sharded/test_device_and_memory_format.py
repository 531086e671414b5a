"""Placements and memory formats of ShardedTensors follow their shards."""

from __future__ import annotations

import copy
from typing import Any

import torch

from shardwright import comm, sharded
from shardwright.sharded import (
    ChunkShardingSpec,
    Shard,
    ShardedTensor,
    ShardMetadata,
    TensorProperties,
)
from shardwright.testing import run_ranks
from tests.sharded.specs_and_errors import chunks


def test_to_keeps_placements_for_a_dtype_and_changes_them_for_a_device() -> None:
    def work() -> list[Any]:
        spec = ChunkShardingSpec(0, ["rank:0/meta", "rank:1/cpu", "rank:1/cpu", "rank:1/cpu"])
        x = sharded.zeros(spec, 3)  # the last shard is empty, and the one before is not
        double = x.to(torch.float64)
        assert double.sharding_spec() is spec
        moved = x.to("meta")
        assert moved.to("meta") is moved
        back = sharded.zeros(chunks(0, 1), 4).to("cpu", torch.float64)
        assert (
            back.shards_metadata() == chunks(0, 1).build_metadata(torch.Size([4]), TensorProperties()).shards_metadata
        )
        assert [shard.tensor.device.type for shard in moved.local_shards()] == ["meta"] * len(x.local_shards())
        return [[str(shard.placement) for shard in tensor.shards_metadata()] for tensor in (double, moved)]

    same = ["rank:0/meta", "rank:1/cpu", "rank:1/cpu", "rank:1/cpu"]
    assert run_ranks(3, work) == [[same, ["rank:0/meta", *["rank:1/meta"] * 3]]] * 3


def test_zeros_like_on_another_device_changes_the_placements() -> None:
    def work() -> list[str]:
        x = sharded.ones(chunks(0, 1), 4)
        made = torch.zeros_like(x, device="meta")
        assert made.device.type == "meta"
        assert all(shard.tensor.is_meta for shard in made.local_shards())
        assert all(shard.metadata in made.shards_metadata() for shard in made.local_shards())
        computed = torch.cumsum(sharded.ones(chunks(0, 1), 4, 2), 1)  # its metadata are computed on meta
        assert [str(shard.placement) for shard in computed.shards_metadata()] == ["rank:0/cpu", "rank:1/cpu"]
        return [str(shard.placement) for shard in made.shards_metadata()]

    assert run_ranks(3, work) == [["rank:0/meta", "rank:1/meta"]] * 3


def test_reshard_keeps_the_memory_format() -> None:
    def work() -> None:
        whole = torch.arange(8 * 3 * 2 * 2.0).reshape(8, 3, 2, 2)
        for history in (False, True):
            x = sharded.empty(chunks(0, 1, 1), 8, 3, 2, 2, memory_format=torch.channels_last, requires_grad=history)
            with torch.no_grad():
                for shard in x.local_shards():
                    shard.tensor.copy_(whole[shard.metadata.region.slices()])
            made = x * 1 if history else x
            made.reshard(chunks(1, 0, dim=1))
            assert made.metadata().tensor_properties.memory_format == torch.channels_last
            for shard in made.local_shards():
                assert shard.tensor.is_contiguous(memory_format=torch.channels_last)
                assert torch.equal(shard.tensor, whole[shard.metadata.region.slices()])
            ShardedTensor._init_from_local_shards_and_global_metadata(made.local_shards(), made.metadata())
            copied = copy.deepcopy(made.detach())
            assert copied.local_tensor().is_contiguous(memory_format=torch.channels_last)
            assert copied.metadata().tensor_properties.memory_format == torch.channels_last

    run_ranks(2, work)


def test_shards_with_one_channel_take_the_memory_format_of_the_others() -> None:
    boxes = [
        ShardMetadata([0, start, 0, 0], [2, count, 4, 4], f"rank:{rank}/cpu")
        for start, count, rank in ((0, 2, 1), (2, 1, 0), (3, 0, 0))
    ]

    def work() -> None:
        for how in (torch.channels_last, torch.contiguous_format):
            # Shards with at most one channel are both contiguous and channels last.
            x = sharded.zeros(sharded.EnumerableShardingSpec(boxes), 2, 3, 4, 4, memory_format=how)
            for made in (
                sharded.init_from_local_shards(x.local_shards(), 2, 3, 4, 4),
                ShardedTensor._init_from_local_shards_and_global_metadata(x.local_shards(), x.metadata()),
            ):
                assert made.metadata().tensor_properties.memory_format == how
        ambiguous = [Shard.from_tensor_and_offsets(torch.zeros(2, 1, 4, 4), [0, comm.rank(), 0, 0])]
        made = sharded.init_from_local_shards(ambiguous, 2, 2, 4, 4)
        assert made.metadata().tensor_properties.memory_format == torch.contiguous_format

    run_ranks(2, work)
