"""Random numbers, dropout and `nn.init`: they depend on seed and global index, not on the sharding."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from shardwright.errors import InPlaceError
from shardwright.layout import Mesh, Region
from shardwright.sharded.base.checks import refuse_nested
from shardwright.sharded.base.registry import implements, implements_named, unsupported
from shardwright.sharded.base.shardwise import check_operands
from shardwright.sharded.base.tensor_base import ShardedTensorBase
from shardwright.tensor.base.registry import canonical_name
from shardwright.tensor.dispatch.decompose import python_body
from shardwright.tensor.random import fill_integers, fill_normal, fill_scaled_mask, fill_uniform
from shardwright.tensor.random.local import next_key, refuse_generator
from shardwright.tensor.rules.create.random import IN_PLACE, Draw

__all__ = ["fill_shards"]

T = TypeVar("T", bound=ShardedTensorBase)


def fill_shards(tensor: T, fill: Callable[..., Any], **options: Any) -> T:
    """Fill the shards with random numbers that depend only on seed and global index; return the tensor."""
    refuse_nested(tensor, "random numbers")
    ranks = tensor._group.ranks
    key = next_key(Mesh((len(ranks),), ranks=ranks))
    with torch.no_grad():
        for shard in tensor.local_shards():
            fill(shard.tensor, shard.metadata.region, tuple(tensor.shape), key.seed, key.offset, **options)
        if not tensor.local_shards():  # validate the parameters on every rank
            nothing = Region.whole([0] * tensor.ndim)
            fill(torch.empty(nothing.size, dtype=tensor.dtype), nothing, nothing.size, key.seed, key.offset, **options)
    return tensor


def _register(draw: Draw) -> None:
    @implements_named(draw.name)
    def _(func: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        if not canonical_name(func)[1]:
            raise unsupported(func, f"only the in-place version is supported: torch.empty_like(x).{draw.name}_()")
        target, options = draw.read(args, kwargs)
        if any(isinstance(value, Tensor) for value in options.values()):
            raise unsupported(func, "its parameters must be numbers")
        if not (target.requires_grad and torch.is_grad_enabled()):
            return fill_shards(target, draw.fill, **options)
        if target.is_leaf:
            raise InPlaceError(
                f"{draw.name}_: {target!r} is a leaf that requires grad and cannot be modified in place: "
                "use `with torch.no_grad():`"
            )
        blank: Any = torch.empty_like(target.detach())
        return target.copy_(fill_shards(blank, draw.fill, **options))


for _draw in IN_PLACE:
    _register(_draw)


@implements_named("rand_like", "randn_like", "randint_like")
def _like(func: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    name = canonical_name(func)[0]
    like = check_operands(func, args, kwargs)
    refuse_generator(name, kwargs.get("generator"))
    limits = [*args[1:], *(kwargs[key] for key in ("low", "high") if key in kwargs)]
    options = {k: v for k, v in kwargs.items() if k not in ("low", "high", "generator", "requires_grad", "input")}
    result: Any = torch.empty_like(like.detach(), **options)
    if name == "randint_like":
        low, high = (0, *limits) if len(limits) == 1 else limits
        fill_shards(result, fill_integers, low=int(low), high=int(high))
    else:
        fill_shards(result, fill_uniform if name == "rand_like" else fill_normal)
    return result.requires_grad_(kwargs.get("requires_grad", False))


@implements_named("dropout")
def _dropout(func: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    named = dict(zip(("input", "p", "training", "inplace"), args, strict=False)) | kwargs
    tensor, p = named["input"], named.get("p", 0.5)
    if not 0 <= p <= 1:
        raise ValueError(f"dropout: p must be between 0 and 1, got {p}")
    if not named.get("train", named.get("training", True)) or p == 0:
        return tensor
    blank: Any = torch.empty_like(tensor.detach())
    mask = fill_shards(blank, fill_scaled_mask, keep_probability=1 - p)
    return tensor.mul_(mask) if named.get("inplace") or canonical_name(func)[1] else tensor * mask


@implements(nn.init.uniform_, nn.init.normal_, nn.init.constant_, nn.init.kaiming_uniform_)
def _init(func: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any]) -> ShardedTensorBase:
    """Run their Python code, bypassing dispatch: it reads the global size and fills in place."""
    body = python_body(func)
    assert body is not None  # they are written in Python
    result: ShardedTensorBase = body(*args, **kwargs)
    return result
