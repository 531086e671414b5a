"""Element by element: each shard of the result comes from the same shards of the operands, and ranks do not talk.

The names are those of the DTensor's own rules, so that both know the same operators.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from shardwright.errors import ArgumentTypeError, MixedTensorsError, ShardError
from shardwright.sharded.base.registry import getters, implements, implements_named, name_of, unsupported
from shardwright.sharded.base.shardwise import check_operands, kind_of, made_like, on_shards
from shardwright.sharded.base.tensor_base import ShardedTensorBase
from shardwright.sharded.transfer.reshard_like import reshard_like
from shardwright.tensor.base.registry import canonical_name
from shardwright.tensor.rules.elementwise.pointwise import CASTS, COPIES, LINEAR_UNARY, NONLINEAR

__all__ = ["pointwise"]

_MORE = "add sub rsub mul div lerp addcmul addcdiv fill zero _threshold coalesce to_dense".split()
_LIKE = "zeros_like ones_like full_like empty_like".split()
_ONLY_OF_COMPLEX = {"view_as_real"}  # it has one dimension more
_MOVES = {"cpu", "cuda", "to", "type"}  # they have answers of their own


@implements_named(
    *(set(NONLINEAR) | set(LINEAR_UNARY) | set(COPIES) | set(CASTS)) - _ONLY_OF_COMPLEX - _MOVES,
    *_MORE,
    *_LIKE,
)
@implements(*getters("real", "imag"))
def pointwise(func: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """The function of the shards, one by one; written into the target where this spelling of it does so."""
    target = kwargs.get("out")
    if canonical_name(func)[1] or kwargs.get("inplace"):
        target = args[0] if args else kwargs["input"]
    if target is not None and not isinstance(target, ShardedTensorBase):
        raise MixedTensorsError(
            f"{name_of(func)}: it would write shards into a plain {type(target).__name__}: gather the operands first"
        )
    first = check_operands(func, args, kwargs)
    given = on_shards(func, first, args, kwargs)
    if target is not None:
        return written(target, given.sample)
    if given.same:
        return first
    where = given.sample.device  # `zeros_like(x, device="meta")` may say another
    moved = None if where.type == first.device.type else where
    made = made_like(func, first, given.values, given.sample, moved)
    if (wanted := kwargs.get("memory_format", torch.preserve_format)) != torch.preserve_format:
        made._metadata.tensor_properties.memory_format = wanted
    return made


def written(target: ShardedTensorBase, sample: Tensor) -> ShardedTensorBase:
    """The target of a write in place, which may have given it a history, or have taken it."""
    if sample.requires_grad != target.requires_grad:
        properties = replace(target._metadata.tensor_properties, requires_grad=sample.requires_grad)
        target._metadata = replace(target._metadata, tensor_properties=properties)
    target._leaf = sample.is_leaf
    return target


@implements_named("where")
def _where(func: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    if len(args) + len(kwargs) < 3:
        raise unsupported(func, "of a condition alone it asks where that holds, and how often is known only together")
    return pointwise(func, args, kwargs)


@implements(Tensor.__setitem__)
def _write_where(func: Callable[..., Any], args: Sequence[Any], _: dict[str, Any]) -> None:
    """`x[mask] = number`: the one way to write by index that needs nothing of other shards."""
    target, index, value = args
    if not isinstance(index, ShardedTensorBase) or index.dtype != torch.bool or isinstance(value, ShardedTensorBase):
        raise unsupported(func, "only `x[mask] = number`, with a mask that is cut alike, is written shard by shard")
    pointwise(Tensor.masked_fill_, (target, index, value), {})


@implements_named("copy")
def _copy(func: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """`copy_`: from a tensor that is cut in another way, values travel, and all ranks must take part."""
    target, source, *rest = (*args, *(kwargs[name] for name in ("src", "other") if name in kwargs))
    both = isinstance(target, ShardedTensorBase) and isinstance(source, ShardedTensorBase)
    if not both or target._is_cut_like(source) or target.shape != source.shape:
        return pointwise(func, args, kwargs)
    if target._group.ranks != source._group.ranks:
        raise ShardError(
            f"copy_: {target!r} is of the group of ranks {list(target._group.ranks)}, its source of "
            f"{list(source._group.ranks)}: nothing moves between groups; use shardwright.checkpoint"
        )
    options = {name: value for name, value in kwargs.items() if name not in ("src", "other")}
    return pointwise(func, (target, reshard_like(source, target), *rest), options)


@implements(Tensor.cpu, Tensor.cuda, Tensor.to, Tensor.type_as)
def _moved(func: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """Where torch is asked past the class: `Tensor.cpu(x)`; and `plain.to(x)`, which wants x's dtype and device."""
    tensor, *rest = args
    kinds = [kind_of(value) if isinstance(value, ShardedTensorBase) else value for value in rest]
    if not isinstance(tensor, ShardedTensorBase):
        return func(tensor, *kinds, **kwargs)
    return getattr(tensor, "to" if func is Tensor.type_as else func.__name__)(*kinds, **kwargs)


@implements(Tensor.type)
def _type(_: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """`x.type()` says what it is, `x.type(dtype)` makes it that."""
    tensor, *rest = args
    rest += [value for name, value in kwargs.items() if name == "dtype"]
    if not rest:
        return kind_of(tensor).type()
    if not isinstance(rest[0], torch.dtype):
        raise ArgumentTypeError(f"type({rest[0]!r}) of a ShardedTensor: give a torch.dtype, or use .to(device)")
    return tensor.to(rest[0])
