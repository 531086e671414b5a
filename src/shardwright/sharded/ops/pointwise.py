"""Pointwise operators: computed shard by shard, without communication.

The list of operators comes from the DTensor's rules, so that both support the same ones.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from shardwright.errors import ArgumentTypeError, MixedTensorsError, ShardError
from shardwright.sharded.base.registry import getters, implements, implements_named, name_of, unsupported
from shardwright.sharded.base.shardwise import check_operands, empty_shard, on_shards, result_like
from shardwright.sharded.base.tensor_base import ShardedTensorBase
from shardwright.sharded.transfer.reshard_like import reshard_like
from shardwright.tensor.base.registry import canonical_name
from shardwright.tensor.rules.elementwise.pointwise import CASTS, COPIES, LINEAR_UNARY, NONLINEAR

__all__ = ["pointwise"]

_OTHERS = "add sub rsub mul div lerp addcmul addcdiv fill zero _threshold coalesce to_dense".split()
_FACTORIES = "zeros_like ones_like full_like empty_like".split()
_COMPLEX_ONLY = {"view_as_real"}  # adds a dimension
_CONVERSIONS = {"cpu", "cuda", "to", "type"}  # implemented below


@implements_named(
    *(set(NONLINEAR) | set(LINEAR_UNARY) | set(COPIES) | set(CASTS)) - _COMPLEX_ONLY - _CONVERSIONS,
    *_OTHERS,
    *_FACTORIES,
)
@implements(*getters("real", "imag"))
def pointwise(func: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """Apply the function shard by shard; in-place and out= variants write into their target."""
    target = kwargs.get("out")
    if canonical_name(func)[1] or kwargs.get("inplace"):
        target = args[0] if args else kwargs["input"]
    if target is not None and not isinstance(target, ShardedTensorBase):
        raise MixedTensorsError(
            f"{name_of(func)}: cannot write a ShardedTensor into a plain {type(target).__name__}: gather the operands "
            "first"
        )
    first = check_operands(func, args, kwargs)
    results = on_shards(func, first, args, kwargs)
    if target is not None:
        return update_grad_flags(target, results.sample)
    if results.unchanged:
        return first
    result_device = results.sample.device  # may differ, as for `zeros_like(x, device="meta")`
    device = None if result_device.type == first.device.type else result_device
    result = result_like(func, first, results.values, results.sample, device)
    if (memory_format := kwargs.get("memory_format", torch.preserve_format)) != torch.preserve_format:
        result._metadata.tensor_properties.memory_format = memory_format
    return result


def update_grad_flags(target: ShardedTensorBase, sample: Tensor) -> ShardedTensorBase:
    """Update requires_grad and is_leaf of the target of an in-place operation, and return it."""
    if sample.requires_grad != target.requires_grad:
        properties = replace(target._metadata.tensor_properties, requires_grad=sample.requires_grad)
        target._metadata = replace(target._metadata, tensor_properties=properties)
    target._leaf = sample.is_leaf
    return target


@implements_named("where")
def _where(func: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """Apply `where(condition, x, y)` shard by shard; refuse `where(condition)`."""
    if len(args) + len(kwargs) < 3:
        raise unsupported(func, "the size of where(condition) depends on the values of all ranks")
    return pointwise(func, args, kwargs)


@implements(Tensor.__setitem__)
def _write_where(func: Callable[..., Any], args: Sequence[Any], _: dict[str, Any]) -> None:
    """Assign `x[mask] = number`, the only indexed assignment that needs no other shards."""
    target, index, value = args
    if not isinstance(index, ShardedTensorBase) or index.dtype != torch.bool or isinstance(value, ShardedTensorBase):
        raise unsupported(func, "only `x[mask] = number`, with a mask of the same sharding, is supported")
    pointwise(Tensor.masked_fill_, (target, index, value), {})


@implements_named("copy")
def _copy(func: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """Copy into the target, as `copy_`; collective if the source has another sharding, which is resharded first."""
    target, source, *rest = (*args, *(kwargs[name] for name in ("src", "other") if name in kwargs))
    both_sharded = isinstance(target, ShardedTensorBase) and isinstance(source, ShardedTensorBase)
    if not both_sharded or target._has_same_shards(source) or target.shape != source.shape:
        return pointwise(func, args, kwargs)
    if target._group.ranks != source._group.ranks:
        raise ShardError(
            f"copy_: {target!r} is in the group of ranks {list(target._group.ranks)}, its source in that of "
            f"{list(source._group.ranks)}: use shardwright.checkpoint to copy between groups"
        )
    options = {name: value for name, value in kwargs.items() if name not in ("src", "other")}
    return pointwise(func, (target, reshard_like(source, target), *rest), options)


@implements(Tensor.cpu, Tensor.cuda, Tensor.to, Tensor.type_as)
def _moved(func: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """Call the method of the class for `Tensor.cpu(x)` and the like; give `plain.to(x)` the dtype and device of x."""
    tensor, *rest = args
    plain = [empty_shard(value) if isinstance(value, ShardedTensorBase) else value for value in rest]
    if not isinstance(tensor, ShardedTensorBase):
        return func(tensor, *plain, **kwargs)
    return getattr(tensor, "to" if func is Tensor.type_as else func.__name__)(*plain, **kwargs)


@implements(Tensor.type)
def _type(_: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """Return the type name for `x.type()`; convert for `x.type(dtype)`."""
    tensor, *rest = args
    rest += [value for name, value in kwargs.items() if name == "dtype"]
    if not rest:
        return empty_shard(tensor).type()
    if not isinstance(rest[0], torch.dtype):
        raise ArgumentTypeError(
            f"type of a ShardedTensor: expected a torch.dtype, got {rest[0]!r}; use .to(device) for a device"
        )
    return tensor.to(rest[0])
