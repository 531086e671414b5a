"""Dimensions in another order, one more of extent 1, or one less: views that keep to a shard."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from shardwright.sharded.base.registry import getters, implements, implements_named, unsupported
from shardwright.sharded.base.shardwise import check_operands, recut, whole_of
from shardwright.sharded.base.tensor_base import ShardedTensorBase
from shardwright.sharded.ops.reduce import cut_dims
from shardwright.tensor.base.registry import canonical_name

__all__: list[str] = []


@implements_named("permute", "transpose", "t", "movedim", "adjoint", "unsqueeze")
@implements(*getters("T", "mT", "H", "mH"))
def _turn(func: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    tensor = _only(func, args, kwargs)
    rest, options = args[1:], {key: value for key, value in kwargs.items() if value is not tensor}
    sample = func(whole_of(tensor), *rest, **options)
    # A tensor whose dimensions are told apart by their extents: 2, 3, 4 and so on. What is 1 afterwards is new.
    told = func(torch.empty(list(range(2, tensor.ndim + 2)), device="meta"), *rest, **options)
    origins = [None if extent == 1 else extent - 2 for extent in told.shape]
    return recut(tensor, _values(tensor, lambda local: func(local, *rest, **options)), sample, origins)


@implements_named("squeeze")
def _squeeze(func: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """A dimension goes if it is 1 in the whole, not if it is 1 in a shard."""
    tensor = _only(func, args, kwargs)
    asked = kwargs.get("dim", args[1] if len(args) > 1 else tuple(range(tensor.ndim)))
    named = asked if isinstance(asked, list | tuple) else (asked,)
    sample = whole_of(tensor).squeeze(tuple(named))
    gone = {dim % tensor.ndim for dim in named if tensor.shape[dim] == 1}
    if cut := sorted(gone & set(cut_dims(tensor))):
        raise unsupported(func, f"dimension {cut[0]} of {tensor!r} is cut into its one element and nothing")
    origins = [dim for dim in range(tensor.ndim) if dim not in gone]
    return recut(tensor, _values(tensor, lambda local: local.squeeze(tuple(gone))), sample, origins)


def _only(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> ShardedTensorBase:
    if canonical_name(func)[1]:
        raise unsupported(func, "the dimensions of a ShardedTensor are not turned in place")
    return check_operands(func, args, kwargs)


def _values(tensor: ShardedTensorBase, local: Callable[[Tensor], Tensor]) -> list[Any]:
    return [local(shard.tensor) for shard in tensor._local_shards]
