"""Invalid shards and arguments raise typed errors, on all ranks."""

from __future__ import annotations

import copy

import pytest
import torch
from torch.distributed._shard.metadata import ShardMetadata as TheirShardMetadata
from torch.nn import functional

import shardwright as sw
from shardwright import comm, interop, sharded
from shardwright.errors import (
    ArgumentTypeError,
    ShardError,
    UnsupportedError,
)
from shardwright.sharded import (
    ChunkShardingSpec,
    Shard,
    ShardedTensor,
    ShardMetadata,
    TensorProperties,
)
from shardwright.testing import run_ranks
from tests.sharded.specs_and_errors import chunks, error_or_result

HERE = ChunkShardingSpec(0, ["rank:0/cpu"] * 2)


def test_an_invalid_shard_raises_on_all_ranks() -> None:
    def work() -> list[str]:
        rank, found = comm.rank(), []
        mine = [
            ShardMetadata([2 * rank], [2], f"rank:{rank}/cpu"),
            TheirShardMetadata([2 * rank], [2], f"rank:{rank}/cpu"),
        ]
        converted = Shard(torch.ones(2), mine[rank])
        assert isinstance(converted.metadata, ShardMetadata)
        assert sharded.init_from_local_shards([converted], 4).shards_metadata()[1].placement.rank() == 1
        for change in ({"tensor": None}, {"metadata": None}):
            shard = Shard(torch.ones(2), mine[0])
            for name, value in change.items() if rank else ():
                setattr(shard, name, value)
            found.append(error_or_result(lambda shard=shard: sharded.init_from_local_shards([shard], 4)))
        spec = chunks(0, 1)
        metadata = spec.build_metadata(torch.Size([4]), TensorProperties())
        build = ShardedTensor._init_from_local_shards_and_global_metadata
        for given, known in (([shard], metadata), ([Shard(torch.ones(2), mine[0])], None if rank else metadata)):
            found.append(error_or_result(lambda given=given, known=known: build(given, known, run_check=True)))
        return found

    first, second = run_ranks(2, work)
    assert first == second
    assert first[0].startswith(
        "ShardError: rank 1: a Shard must have a torch.Tensor and a sharded.ShardMetadata, got NoneType and "
        "ShardMetadata"
    )
    assert first[1].startswith(
        "ShardError: rank 1: a Shard must have a torch.Tensor and a sharded.ShardMetadata, got Tensor and NoneType"
    )
    assert (
        "rank 1: ArgumentTypeError: a Shard must have a torch.Tensor and a sharded.ShardMetadata, got Tensor and "
        "NoneType" in first[2]
    )
    assert "rank 1: ArgumentTypeError: expected a sharded.ShardedTensorMetadata, got NoneType" in first[3]


def test_a_shard_validates_its_tensor_and_metadata() -> None:
    for wrong in (lambda: Shard(None, ShardMetadata([0], [2])), lambda: Shard(torch.ones(2), "rank:0")):
        with pytest.raises(ArgumentTypeError, match=r"Shard: (tensor|metadata) must be"):
            wrong()


def test_a_shard_on_another_device_than_its_placement_raises() -> None:
    metadata = ChunkShardingSpec(0, ["rank:0/meta"]).build_metadata(torch.Size([4]), TensorProperties())
    mine = [Shard(torch.ones(4), ShardMetadata([0], [4], "rank:0/cpu"))]
    with pytest.raises(ShardError, match=r"rank 0: the shard \[0:4\] is on cpu, but its placement is rank:0/meta"):
        ShardedTensor._init_from_local_shards_and_global_metadata(mine, metadata)


def test_nested_tensors_are_refused_by_everything_that_needs_their_boxes() -> None:
    def work() -> list[str]:
        rank = comm.rank()
        mesh = sw.init_device_mesh("cpu", (2,))
        inner = [sharded.ones(chunks(0, 1), 4, 2), sw.distribute_tensor(torch.ones(4, 2), mesh, [sw.Shard(0)])]
        found = []
        for held in inner:
            x = sharded.init_from_local_shards([Shard(held, ShardMetadata([0, 0], [4, 2], f"rank:{rank}/cpu"))], 4, 2)
            for tensor in (x, x.detach(), copy.copy(x)):
                found += [
                    error_or_result(lambda tensor=tensor: tensor.gather()),
                    error_or_result(lambda tensor=tensor: tensor.reshard(chunks(1, 0))),
                    error_or_result(lambda tensor=tensor: tensor.to(torch.float64)),
                    error_or_result(lambda tensor=tensor: sharded.to_dtensor(tensor)),
                    error_or_result(lambda tensor=tensor: interop.to_torch_sharded_tensor(tensor)),
                    error_or_result(lambda tensor=tensor: functional.embedding(torch.tensor([0]), tensor)),
                    error_or_result(lambda tensor=tensor: functional.linear(torch.ones(1, 2), tensor)),
                    error_or_result(lambda tensor=tensor: tensor.uniform_()),
                ]
        return found

    first, second = run_ranks(2, work)
    assert first == second
    assert all(text.startswith("UnsupportedError") and "are themselves sharded" in text for text in first)


def test_factories_validate_dtype_and_pin_memory() -> None:
    for make in (sharded.zeros, sharded.rand, sharded.empty):
        with pytest.raises(ArgumentTypeError, match=r"dtype must be a torch\.dtype, got 'float32'"):
            make(HERE, 4, dtype="float32")
        if not torch.accelerator.is_available():
            with pytest.raises(UnsupportedError, match="pin_memory=True needs an accelerator"):
                make(HERE, 4, pin_memory=True)
