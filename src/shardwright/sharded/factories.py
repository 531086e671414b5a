"""Factories of ShardedTensors: every rank allocates only its own shards.

`size` is the global size, as ints or as one sequence; dtype and the like are torch's.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypedDict, Unpack

import torch

from shardwright.sharded.metadata.spec import ShardingSpec
from shardwright.sharded.ops.draw import fill_shards
from shardwright.sharded.tensor import ShardedTensor
from shardwright.tensor.random import fill_normal, fill_uniform

__all__ = ["ShardedFactoryOptions", "empty", "full", "ones", "rand", "randn", "zeros"]


class ShardedFactoryOptions(TypedDict, total=False):
    """Keyword arguments of all factories: torch's own, the process group, and whether to create RRefs for RPC.

    >>> from shardwright import sharded
    >>> options: sharded.ShardedFactoryOptions = {"dtype": torch.float64}
    >>> sharded.zeros(sharded.ChunkShardingSpec(0, ["rank:0/cpu"]), 2, **options).dtype
    torch.float64
    """

    dtype: torch.dtype | None
    layout: torch.layout
    requires_grad: bool
    pin_memory: bool
    memory_format: torch.memory_format
    process_group: Any
    init_rrefs: bool


def empty(sharding_spec: ShardingSpec, *size: Any, **options: Unpack[ShardedFactoryOptions]) -> ShardedTensor:
    """Return an uninitialised ShardedTensor.

    >>> from shardwright import sharded
    >>> sharded.empty(sharded.ChunkShardingSpec(1, ["rank:0/cpu"]), 2, 3).shape
    torch.Size([2, 3])
    """
    return ShardedTensor(sharding_spec, *size, **options)


def zeros(sharding_spec: ShardingSpec, *size: Any, **options: Unpack[ShardedFactoryOptions]) -> ShardedTensor:
    """Return a ShardedTensor of zeros.

    >>> from shardwright import sharded
    >>> sharded.zeros(sharded.ChunkShardingSpec(0, ["rank:0/cpu"]), 2).gather()
    tensor([0., 0.])
    """
    return full(sharding_spec, size, 0, **options)


def ones(sharding_spec: ShardingSpec, *size: Any, **options: Unpack[ShardedFactoryOptions]) -> ShardedTensor:
    """Return a ShardedTensor of ones.

    >>> from shardwright import sharded
    >>> sharded.ones(sharded.ChunkShardingSpec(0, ["rank:0/cpu"]), 2).gather()
    tensor([1., 1.])
    """
    return full(sharding_spec, size, 1, **options)


def full(
    sharding_spec: ShardingSpec, size: Sequence[Any], fill_value: Any, **options: Unpack[ShardedFactoryOptions]
) -> ShardedTensor:
    """Return a ShardedTensor filled with one value.

    >>> from shardwright import sharded
    >>> sharded.full(sharded.ChunkShardingSpec(0, ["rank:0/cpu"]), (2,), 0.5).gather()
    tensor([0.5000, 0.5000])
    """
    tensor = ShardedTensor(sharding_spec, *size, **options)
    with torch.no_grad():
        for shard in tensor.local_shards():
            shard.tensor.fill_(fill_value)
    return tensor


def rand(sharding_spec: ShardingSpec, *size: Any, **options: Unpack[ShardedFactoryOptions]) -> ShardedTensor:
    """Return uniform random numbers in [0, 1): those of `shardwright.rand`, for every spec and number of ranks.

    >>> import shardwright as sw
    >>> sw.manual_seed(0)
    >>> sw.sharded.rand(sw.sharded.ChunkShardingSpec(0, ["rank:0/cpu"]), 3).gather()
    tensor([0.2117, 0.3332, 0.1760])
    """
    return fill_shards(ShardedTensor(sharding_spec, *size, **options), fill_uniform)


def randn(sharding_spec: ShardingSpec, *size: Any, **options: Unpack[ShardedFactoryOptions]) -> ShardedTensor:
    """Return standard normal random numbers: those of `shardwright.randn`, for every spec and number of ranks.

    >>> import shardwright as sw
    >>> sw.manual_seed(0)
    >>> sw.sharded.randn(sw.sharded.ChunkShardingSpec(0, ["rank:0/cpu"]), 3).gather()
    tensor([0.8912, 0.5441, 0.4056])
    """
    return fill_shards(ShardedTensor(sharding_spec, *size, **options), fill_normal)
