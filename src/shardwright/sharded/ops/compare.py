"""One answer about the whole tensor, the same on every rank: `equal`, `allclose`, and `all()` and `any()` of it.

All ranks of the group ask together. Nothing but a byte of each rank travels.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from shardwright import comm
from shardwright.errors import MixedTensorsError, ShardError
from shardwright.sharded.base import ShardedTensorBase
from shardwright.sharded.ops.locally import check_operands, on_shards
from shardwright.sharded.ops.reduce import along
from shardwright.sharded.ops.registry import implements_named
from shardwright.sharded.tensor import ShardedTensor
from shardwright.tensor.registry import canonical_name

__all__: list[str] = []


@implements_named("equal")
def _equal(func: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any]) -> bool:
    first, second = (*args, *kwargs.values())
    _check_kinds("equal", first, second)
    if first.shape != second.shape or first.dtype != second.dtype:
        return False
    return _all_say("equal", func, first, second, {})


@implements_named("allclose")
def _allclose(_: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any]) -> bool:
    named = dict(zip(("input", "other", "rtol", "atol", "equal_nan"), args, strict=False)) | kwargs
    first, second = named.pop("input", None), named.pop("other", None)
    _check_kinds("allclose", first, second)
    return _all_say("allclose", torch.allclose, first, second, named)


@implements_named("all", "any")
def _truth(func: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """Of the whole tensor, a plain tensor that says true or false; along a dimension, a reduction like the others."""
    if len(args) + len(kwargs) > 1:
        return along(func, args, kwargs)
    (tensor,) = (*args, *kwargs.values())
    mine = [bool(func(shard.tensor)) for shard in tensor._local_shards]
    name = canonical_name(func)[0]
    fold = all if name == "all" else any
    return torch.tensor(fold(_told(name, tensor._group, fold(mine))), device=tensor.device)


def _told(name: str, group: comm.Group, mine: bool) -> list[bool]:
    """What every rank says."""
    return [said == b"1" for said in comm.gather_bytes(b"1" if mine else b"0", group, what=name)]


def _check_kinds(name: str, *tensors: Any) -> None:
    for tensor in tensors:
        if not isinstance(tensor, ShardedTensorBase):
            what = f"a plain tensor of size {list(tensor.shape)}" if isinstance(tensor, Tensor) else repr(tensor)
            raise MixedTensorsError(
                f"{name}: {what} beside a ShardedTensor: gather() the one, or cut the other alike, with "
                "a.sharding_spec().shard(tensor)"
            )


def _all_say(
    name: str, func: Callable[..., bool], first: ShardedTensor, second: ShardedTensor, how: dict[str, Any]
) -> bool:
    group = first._group
    if group.ranks != second._group.ranks:
        raise ShardError(
            f"{name}: {first!r} is of the group of ranks {list(group.ranks)}, {second!r} of "
            f"{list(second._group.ranks)}: compare tensors of one group"
        )
    check_operands(func, (first, second), {})
    # A rank without shards asks about examples: where torch refuses the two dtypes, it does so there too.
    given = on_shards(lambda a, b: func(a, b, **how), first, (first, second), {})
    return all(_told(name, group, all(given.values)))
