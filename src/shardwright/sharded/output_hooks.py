"""Forward hooks that reshard a module's output, or return this rank's part of it as a plain tensor."""

from __future__ import annotations

from typing import Any, TypeVar

from torch import Tensor, nn

from shardwright.errors import ArgumentTypeError
from shardwright.sharded.metadata.spec import ShardingSpec
from shardwright.sharded.tensor import ShardedTensor

__all__ = ["collect_local_shard", "reshard_output"]

Module = TypeVar("Module", bound=nn.Module)


def reshard_output(module: Module, resharding_spec: ShardingSpec) -> Module:
    """Register a hook that reshards the module's output, a ShardedTensor, to the spec. Differentiable.

    >>> from torch import nn
    >>> from shardwright import sharded
    >>> resharding = sharded.reshard_output(nn.Identity(), sharded.ChunkShardingSpec(0, ["rank:0/cpu"] * 2))
    >>> len(resharding(sharded.ones(sharded.ChunkShardingSpec(1, ["rank:0/cpu"]), 4, 2)).local_shards())
    2
    """
    if not isinstance(resharding_spec, ShardingSpec):
        raise ArgumentTypeError(f"reshard_output: expected a ShardingSpec, got {type(resharding_spec).__name__}")

    def hook(module: nn.Module, _: Any, output: Any) -> ShardedTensor:
        if not isinstance(output, ShardedTensor):
            raise ArgumentTypeError(
                f"reshard_output: {type(module).__name__} must return a ShardedTensor, got {type(output).__name__}"
            )
        # Reshard another object with the same shards: the module may keep its output, which must not change.
        alias = output._with([shard.tensor for shard in output.local_shards()], requires_grad=output.requires_grad)
        return alias.reshard(resharding_spec)

    module.register_forward_hook(hook)
    return module


def collect_local_shard(module: Module) -> Module:
    """Register a hook that returns this rank's only shard of the module's output as a plain tensor.

    Use it at the end of the sharded part of a model. Plain tensors are returned unchanged.

    >>> from torch import nn
    >>> from shardwright import sharded
    >>> last = sharded.collect_local_shard(nn.Identity())
    >>> last(sharded.ones(sharded.ChunkShardingSpec(0, ["rank:0/cpu"]), 2))
    tensor([1., 1.])
    """

    def hook(module: nn.Module, _: Any, output: Any) -> Tensor:
        if isinstance(output, ShardedTensor):
            return output.local_tensor()
        if isinstance(output, Tensor):
            return output
        raise ArgumentTypeError(
            f"collect_local_shard: {type(module).__name__} must return a tensor, got {type(output).__name__}: use a "
            "submodule that returns one"
        )

    module.register_forward_hook(hook)
    return module
