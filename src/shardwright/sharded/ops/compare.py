"""One answer about the whole tensor, the same on every rank: `equal`, `allclose`, and `all()` and `any()` of it.

All ranks of the group ask together. Nothing but a byte of each rank travels.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from shardwright.errors import MixedTensorsError, ShardError
from shardwright.sharded.base.registry import implements_named
from shardwright.sharded.base.shardwise import on_shards
from shardwright.sharded.base.tensor_base import ShardedTensorBase
from shardwright.sharded.ops.announce import announce
from shardwright.sharded.ops.reduce import along
from shardwright.tensor.base.registry import canonical_name

__all__: list[str] = []


@implements_named("equal")
def _equal(_: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any]) -> bool:
    first, second = (*args, *kwargs.values())

    def same() -> bool:
        _check_kinds("equal", first, second)
        if first.shape != second.shape or first.dtype != second.dtype:
            return False
        return _alike("equal", torch.equal, first, second)

    return all(_told("equal", same, first, second))


@implements_named("allclose")
def _allclose(_: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any]) -> bool:
    named = dict(zip(("input", "other", "rtol", "atol", "equal_nan"), args, strict=False)) | kwargs
    first, second = named.pop("input", None), named.pop("other", None)

    def close() -> bool:
        _check_kinds("allclose", first, second)
        return _alike("allclose", lambda a, b: torch.allclose(a, b, **named), first, second)

    return all(_told("allclose", close, first, second))


@implements_named("all", "any")
def _truth(func: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """Of the whole tensor, a plain tensor that says true or false; along a dimension, a reduction like the others."""
    if len(args) + len(kwargs) > 1:
        return along(func, args, kwargs)
    (tensor,) = (*args, *kwargs.values())
    name = canonical_name(func)[0]
    fold = all if name == "all" else any

    def mine() -> bool:
        return fold(bool(func(shard.tensor)) for shard in tensor._local_shards)

    return torch.tensor(fold(_told(name, mine, tensor)), device=tensor.device)


def _told(name: str, mine: Callable[[], bool], *given: Any) -> list[bool]:
    """What every rank says; where one of them cannot tell, all raise."""
    tensor = next(one for one in given if isinstance(one, ShardedTensorBase))

    def say() -> tuple[None, bytes]:
        return None, b"1" if mine() else b"0"

    _, told = announce(say, f"{name} of a ShardedTensor", tensor._group, name)
    return [said == b"1" for said in told]


def _check_kinds(name: str, *tensors: Any) -> None:
    for tensor in tensors:
        if not isinstance(tensor, ShardedTensorBase):
            what = f"a plain tensor of size {list(tensor.shape)}" if isinstance(tensor, Tensor) else repr(tensor)
            raise MixedTensorsError(
                f"{name}: {what} beside a ShardedTensor: gather() the one, or cut the other alike, with "
                "a.sharding_spec().shard(tensor)"
            )


def _alike(
    name: str, func: Callable[[Tensor, Tensor], bool], first: ShardedTensorBase, second: ShardedTensorBase
) -> bool:
    """Whether the function says so of all of this rank's shards."""
    # All ranks say the same, so none says what it holds itself.
    if first._group.ranks != second._group.ranks:
        raise ShardError(
            f"{name}: a ShardedTensor of the group of ranks {list(first._group.ranks)} and one of "
            f"{list(second._group.ranks)}: compare tensors of one group"
        )
    if not first._is_cut_like(second):
        one, other = (f"size {list(x.shape)} in {len(x.shards_metadata())} shards" for x in (first, second))
        raise ShardError(
            f"{name}: ShardedTensors of {one} and of {other} are not cut alike, so their shards do not lie on top of "
            "each other: bring one to the other's spec with b.reshard(a.sharding_spec())"
        )
    # A rank without shards asks about examples: where torch refuses the two dtypes, it does so there too.
    return all(on_shards(func, first, (first, second), {}).values)
