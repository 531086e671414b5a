"""User-defined operators on ShardedTensors."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

from torch.utils import _pytree as pytree

from shardwright.errors import ArgumentTypeError
from shardwright.sharded.base.registry import implements
from shardwright.sharded.base.tensor_base import ShardedTensorBase

__all__ = ["Implementation", "custom_sharded_op_impl"]

Implementation: TypeAlias = Callable[[tuple[type, ...], Sequence[Any], dict[str, Any], Any], Any]


def custom_sharded_op_impl(func: Callable[..., Any]) -> Callable[[Implementation], Implementation]:
    """Return a decorator that makes a function the implementation of a torch function on ShardedTensors.

    It is called as `implementation(types, args, kwargs, process_group)` whenever `func` is called with a ShardedTensor
    among its arguments: `types` are the classes of ShardedTensors among them, `process_group` is that of the first. It
    replaces an existing implementation. Other variants of an operator (`torch.add`, `Tensor.add`) are separate
    functions.

    >>> import torch
    >>> from shardwright import sharded
    >>> @sharded.custom_sharded_op_impl(torch.histc)
    ... def local_histogram(types, args, kwargs, process_group):
    ...     return [torch.histc(shard.tensor, **kwargs) for shard in args[0].local_shards()]
    >>> torch.histc(sharded.ones(sharded.ChunkShardingSpec(0, ["rank:0/cpu"]), 3), bins=2, max=2)
    [tensor([0., 3.])]
    """
    if not callable(func):
        raise ArgumentTypeError(f"custom_sharded_op_impl: expected a torch function, got {func!r}")

    def register(implementation: Implementation) -> Implementation:
        @implements(func)
        def call(_: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
            tensors = [leaf for leaf in pytree.tree_leaves((args, kwargs)) if isinstance(leaf, ShardedTensorBase)]
            group = tensors[0]._process_group if tensors else None
            return implementation(tuple(dict.fromkeys(map(type, tensors))), args, kwargs, group)

        return implementation

    return register
