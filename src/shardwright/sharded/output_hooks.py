"""What a module gives back: its output cut another way, or this rank's part of it as a plain tensor."""

from __future__ import annotations

from typing import Any, TypeVar

from torch import Tensor, nn

from shardwright.errors import ArgumentTypeError
from shardwright.sharded.metadata.spec import ShardingSpec
from shardwright.sharded.tensor import ShardedTensor

__all__ = ["collect_local_shard", "reshard_output"]

Module = TypeVar("Module", bound=nn.Module)


def reshard_output(module: Module, resharding_spec: ShardingSpec) -> Module:
    """The module, whose output, a ShardedTensor, is from now on cut as the spec says. Gradients flow back.

    >>> from torch import nn
    >>> from shardwright import sharded
    >>> cut = sharded.reshard_output(nn.Identity(), sharded.ChunkShardingSpec(0, ["rank:0/cpu"] * 2))
    >>> len(cut(sharded.ones(sharded.ChunkShardingSpec(1, ["rank:0/cpu"]), 4, 2)).local_shards())
    2
    """
    if not isinstance(resharding_spec, ShardingSpec):
        raise ArgumentTypeError(f"reshard_output: {type(resharding_spec).__name__} is not a ShardingSpec")

    def hook(here: nn.Module, _: Any, output: Any) -> ShardedTensor:
        if not isinstance(output, ShardedTensor):
            raise ArgumentTypeError(
                f"reshard_output: {type(here).__name__} gave a {type(output).__name__}, and only a ShardedTensor can "
                "be resharded"
            )
        # Another object of the same shards: the module may keep the one it gave, which must stay as it is.
        alias = output._with([shard.tensor for shard in output.local_shards()], requires_grad=output.requires_grad)
        return alias.reshard(resharding_spec)

    module.register_forward_hook(hook)
    return module


def collect_local_shard(module: Module) -> Module:
    """The module, which from now on gives this rank's only shard of its output as a plain tensor.

    For the end of the sharded part of a model. An output that is a plain tensor already stays what it is.

    >>> from torch import nn
    >>> from shardwright import sharded
    >>> last = sharded.collect_local_shard(nn.Identity())
    >>> last(sharded.ones(sharded.ChunkShardingSpec(0, ["rank:0/cpu"]), 2))
    tensor([1., 1.])
    """

    def hook(here: nn.Module, _: Any, output: Any) -> Tensor:
        if isinstance(output, ShardedTensor):
            return output.local_tensor()
        if isinstance(output, Tensor):
            return output
        raise ArgumentTypeError(
            f"collect_local_shard: {type(here).__name__} gave a {type(output).__name__}, not a tensor: collect from a "
            "submodule that gives one"
        )

    module.register_forward_hook(hook)
    return module
