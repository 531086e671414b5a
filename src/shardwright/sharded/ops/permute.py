"""permute, transpose, unsqueeze and squeeze: views within each shard."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from shardwright.sharded.base.registry import getters, implements, implements_named, unsupported
from shardwright.sharded.base.shardwise import check_operands, global_meta, result_with_dims
from shardwright.sharded.base.tensor_base import ShardedTensorBase
from shardwright.sharded.ops.reduce import sharded_dims
from shardwright.tensor.base.registry import canonical_name

__all__: list[str] = []


@implements_named("permute", "transpose", "t", "movedim", "adjoint", "unsqueeze")
@implements(*getters("T", "mT", "H", "mH"))
def _permute(func: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    tensor = _only(func, args, kwargs)
    rest, options = args[1:], {key: value for key, value in kwargs.items() if value is not tensor}
    sample = func(global_meta(tensor), *rest, **options)
    # Apply the function to a tensor with extents 2, 3, 4, ... to see where each dimension goes; extent 1 is new.
    traced = func(torch.empty(list(range(2, tensor.ndim + 2)), device="meta"), *rest, **options)
    origins = [None if extent == 1 else extent - 2 for extent in traced.shape]
    return result_with_dims(tensor, _values(tensor, lambda local: func(local, *rest, **options)), sample, origins)


@implements_named("squeeze")
def _squeeze(func: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """Remove dimensions of global extent 1; a shard of extent 1 is not enough."""
    tensor = _only(func, args, kwargs)
    dim = kwargs.get("dim", args[1] if len(args) > 1 else tuple(range(tensor.ndim)))
    dims = dim if isinstance(dim, list | tuple) else (dim,)
    sample = global_meta(tensor).squeeze(tuple(dims))
    removed = {dim % tensor.ndim for dim in dims if tensor.shape[dim] == 1}
    if split := sorted(removed & set(sharded_dims(tensor))):
        raise unsupported(func, f"dimension {split[0]} of {tensor!r} is sharded, with empty shards")
    origins = [dim for dim in range(tensor.ndim) if dim not in removed]
    return result_with_dims(tensor, _values(tensor, lambda local: local.squeeze(tuple(removed))), sample, origins)


def _only(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> ShardedTensorBase:
    if canonical_name(func)[1]:
        raise unsupported(func, "a ShardedTensor cannot be permuted in place")
    return check_operands(func, args, kwargs)


def _values(tensor: ShardedTensorBase, local: Callable[[Tensor], Tensor]) -> list[Any]:
    return [local(shard.tensor) for shard in tensor._local_shards]
