"""Reshard a tensor like another one."""

from __future__ import annotations

from typing import TypeVar

import torch

from shardwright.sharded.base.tensor_base import ShardedTensorBase
from shardwright.sharded.metadata.spec import EnumerableShardingSpec
from shardwright.sharded.transfer.reshard import reshard

__all__ = ["reshard_like"]

T = TypeVar("T", bound=ShardedTensorBase)


def reshard_like(source: T, target: ShardedTensorBase) -> T:
    """Return `source` with the sharding of `target`: itself if they agree, else a new tensor.

    Collective if the shardings differ. Differentiable.

    >>> from shardwright import sharded
    >>> one, two = (sharded.ones(sharded.ChunkShardingSpec(0, ["rank:0/cpu"] * n), 4) for n in (1, 2))
    >>> reshard_like(one, two)
    ShardedTensor([4], torch.float32, 2 shards; here: [0:2], [2:4])
    >>> one
    ShardedTensor([4], torch.float32, 1 shards; here: [0:4])
    """
    if source._has_same_shards(target):
        return source
    differentiable = source.requires_grad and torch.is_grad_enabled()
    if differentiable:
        result = source._with(
            [shard.tensor.view_as(shard.tensor) for shard in source._local_shards], requires_grad=True
        )
    else:
        result = source.detach()  # a new object, because `source` must not change
    reshard(result, EnumerableShardingSpec(target.shards_metadata()))
    result._spec = target._spec
    return result
