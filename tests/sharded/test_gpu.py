"""ShardedTensors on a CUDA device, in a single process and on ranks that share the device over gloo."""

from __future__ import annotations

import copy

import pytest
import torch

import shardwright as sw
from shardwright import comm, sharded
from shardwright.errors import ShardError
from shardwright.sharded import ChunkShardingSpec, EnumerableShardingSpec, Shard, ShardMetadata, TensorProperties
from shardwright.testing import run_ranks

pytestmark = pytest.mark.gpu

WHOLE = torch.arange(45.0).reshape(9, 5)


def on(device: str, *ranks: int, dim: int = 0) -> ChunkShardingSpec:
    return ChunkShardingSpec(dim, [f"rank:{rank}/{device}" for rank in ranks])


def test_factories_give_the_same_values_on_cpu_and_device() -> None:
    for make in (sharded.rand, sharded.randn):
        drawn = []
        for device in ("cpu", "cuda:0"):
            sw.manual_seed(3)
            made = make(on(device, 0, 0), 9, 5)
            assert all(shard.tensor.device == torch.device(device) for shard in made.local_shards())
            drawn.append(made.gather().cpu())
        torch.testing.assert_close(*drawn, rtol=1e-6, atol=1e-6)
    assert sharded.ones(on("cuda:0", 0), 3).gather().is_cuda


def test_tensors_move_to_the_device_and_back() -> None:
    here = on("cpu", 0, 0).shard(WHOLE)
    there = here.cuda()
    assert there.device == torch.device("cuda", torch.cuda.current_device())
    assert [str(shard.placement) for shard in there.shards_metadata()] == ["rank:0/cuda:0"] * 2
    assert all(shard.tensor.is_cuda for shard in there.local_shards())
    assert there.cuda() is there
    back = there.cpu()
    assert back.shards_metadata() == here.shards_metadata()
    assert torch.equal(back.gather(), WHOLE)
    out = torch.zeros(9, 5)
    assert there.gather(out=out) is out  # a buffer on another device
    assert torch.equal(out, WHOLE)
    assert there.gather().is_cuda


def test_pinned_shards_match_their_metadata() -> None:
    made = sharded.zeros(on("cpu", 0), 4, pin_memory=True)
    assert made.local_tensor().is_pinned()
    assert TensorProperties.create_from_tensor(made.local_tensor()).pin_memory
    assert not made.clone().metadata().tensor_properties.pin_memory
    assert not made.cuda().cpu().metadata().tensor_properties.pin_memory
    plain = [Shard.from_tensor_and_offsets(torch.zeros(2), [2])]
    pinned = [Shard.from_tensor_and_offsets(torch.zeros(2).pin_memory(), [0])]
    with pytest.raises(ShardError, match="rank 0, shard 1: pin_memory is False, but True in shard 0 of rank 0"):
        sharded.init_from_local_shards(pinned + plain, 4)


def test_reshard_keeps_shards_pinned_and_copies_are_pageable() -> None:
    made = sharded.rand(on("cpu", 0, 0), 9, 5, pin_memory=True, requires_grad=True)
    whole = made.gather()
    for tensor in (copy.deepcopy(made), made * 1, (made * 1).reshard(on("cpu", 0, dim=1))):
        assert not tensor.metadata().tensor_properties.pin_memory
        assert not any(shard.tensor.is_pinned() for shard in tensor.local_shards())
        sharded.ShardedTensor._init_from_local_shards_and_global_metadata(tensor.local_shards(), tensor.metadata())
    made.reshard(on("cpu", 0, 0, 0, dim=1))
    assert made.metadata().tensor_properties.pin_memory
    assert all(shard.tensor.is_pinned() and shard.tensor.is_leaf for shard in made.local_shards())
    assert torch.equal(made.gather(), whole)
    sharded.ShardedTensor._init_from_local_shards_and_global_metadata(made.local_shards(), made.metadata())
    made.reshard(on("cuda", 0))
    assert not made.metadata().tensor_properties.pin_memory
    assert torch.equal(made.gather().cpu(), whole)
    with pytest.raises(ShardError, match=r"pin_memory=True .* shard \[0:4\] is on rank:0/cuda:0"):
        sharded.zeros(on("cuda:0", 0), 4, pin_memory=True)


def test_to_sets_the_device_index_of_local_shards_only() -> None:
    def work() -> tuple[list[str], list[str]]:
        there = on("cpu", 0, 1).shard(WHOLE).cuda()
        double = there.to(torch.float64)
        assert there.cuda() is there is there.to("cuda:0")
        kept = there.reshard(on("cuda", 1, 0, dim=1))
        assert all(shard.tensor.device == torch.device("cuda:0") for shard in kept.local_shards())
        places = [str(shard.placement) for shard in double.shards_metadata()]
        return places, [str(shard.placement) for shard in double.cpu().shards_metadata()]

    back = ["rank:0/cpu", "rank:1/cpu"]
    assert run_ranks(2, work, timeout=150.0) == [
        (["rank:0/cuda:0", "rank:1/cuda"], back),
        (["rank:0/cuda", "rank:1/cuda:0"], back),
    ]


def test_a_tensor_on_the_wrong_device_is_refused() -> None:
    shard = Shard(torch.zeros(4, device="cuda"), ShardMetadata([0], [4], "rank:0/cpu"))
    with pytest.raises(ShardError, match="rank 0, shard 0: the tensor is on cuda:0, but its placement is rank:0/cpu"):
        sharded.init_from_local_shards([shard], 4)


def test_shards_on_two_devices_of_one_rank_are_moved_and_gathered() -> None:
    mixed = EnumerableShardingSpec(
        [ShardMetadata([0, 0], [4, 5], "rank:0/cuda:0"), ShardMetadata([4, 0], [5, 5], "rank:0/cpu")]
    )
    made = mixed.shard(WHOLE)
    assert [shard.tensor.device.type for shard in made.local_shards()] == ["cuda", "cpu"]
    assert torch.equal(made.gather().cpu(), WHOLE)
    made.reshard(on("cpu", 0, dim=1))
    assert torch.equal(made.gather(), WHOLE)
    made.reshard(mixed)
    assert [shard.tensor.device.type for shard in made.local_shards()] == ["cuda", "cpu"]
    assert torch.equal(made.gather().cpu(), WHOLE)


def test_ranks_that_share_the_device_reshard_and_gather_over_gloo() -> None:
    def work() -> None:
        rank = comm.world().rank
        made = on("cuda:0", 0, 1, 3, 3).shard(WHOLE.cuda(), src_rank=2)
        for target in (on("cuda:0", 3, 2, 1, dim=1), on("cpu", 0, 2), on("cuda:0", 1), on("cuda:0", 0, 1, 2, 3)):
            made.reshard(target)
            for shard in made.local_shards():
                assert shard.tensor.device == shard.metadata.placement.device()
                assert torch.equal(shard.tensor.cpu(), WHOLE[shard.metadata.region.slices()])
            whole = made.gather(2)
            assert whole is None if rank != 2 else torch.equal(whole.cpu(), WHOLE)

    run_ranks(4, work, timeout=150.0)


def test_gradients_come_back_to_the_device() -> None:
    def work() -> None:
        x = on("cuda:0", 0, 1).shard(WHOLE.cuda()).requires_grad_()
        y = x.clone().reshard(on("cuda:0", 1, 0, dim=1))
        sum((shard.tensor**2).sum() for shard in y.local_shards()).backward()
        for shard in x.local_shards():
            assert shard.tensor.grad.is_cuda
            assert torch.equal(shard.tensor.grad.cpu(), 2 * WHOLE[shard.metadata.region.slices()])

    run_ranks(2, work, timeout=150.0)
