"""`equal`, `allclose`, `all()` and `any()` of the global tensor, with the same result on every rank.

Collective; each rank sends one byte.
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
        return _all_shards("equal", torch.equal, first, second)

    return all(_gather_bools("equal", same, first, second))


@implements_named("allclose")
def _allclose(_: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any]) -> bool:
    named = dict(zip(("input", "other", "rtol", "atol", "equal_nan"), args, strict=False)) | kwargs
    first, second = named.pop("input", None), named.pop("other", None)

    def close() -> bool:
        _check_kinds("allclose", first, second)
        return _all_shards("allclose", lambda a, b: torch.allclose(a, b, **named), first, second)

    return all(_gather_bools("allclose", close, first, second))


@implements_named("all", "any")
def _all_or_any(func: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """Return a plain 0-dim bool tensor; along a dimension, a reduction like the others."""
    if len(args) + len(kwargs) > 1:
        return along(func, args, kwargs)
    (tensor,) = (*args, *kwargs.values())
    name = canonical_name(func)[0]
    fold = all if name == "all" else any

    def local() -> bool:
        return fold(bool(func(shard.tensor)) for shard in tensor._local_shards)

    return torch.tensor(fold(_gather_bools(name, local, tensor)), device=tensor.device)


def _gather_bools(name: str, local: Callable[[], bool], *operands: Any) -> list[bool]:
    """Gather the results of all ranks; if one raises, all raise."""
    tensor = next(operand for operand in operands if isinstance(operand, ShardedTensorBase))

    def encode() -> tuple[None, bytes]:
        return None, b"1" if local() else b"0"

    _, messages = announce(encode, f"{name} of a ShardedTensor", tensor._group, name)
    return [message == b"1" for message in messages]


def _check_kinds(name: str, *tensors: Any) -> None:
    for tensor in tensors:
        if not isinstance(tensor, ShardedTensorBase):
            operand = f"a plain tensor of size {list(tensor.shape)}" if isinstance(tensor, Tensor) else repr(tensor)
            raise MixedTensorsError(
                f"{name}: cannot compare {operand} with a ShardedTensor: gather() the ShardedTensor, or shard the "
                "other with a.sharding_spec().shard(tensor)"
            )


def _all_shards(
    name: str, func: Callable[[Tensor, Tensor], bool], first: ShardedTensorBase, second: ShardedTensorBase
) -> bool:
    """True if the function is true for all of this rank's shards."""
    # Error messages must be the same on all ranks, so they do not mention local shards.
    if first._group.ranks != second._group.ranks:
        raise ShardError(
            f"{name}: the ShardedTensors are in different groups of ranks, {list(first._group.ranks)} and "
            f"{list(second._group.ranks)}"
        )
    if not first._has_same_shards(second):
        first_text, second_text = (
            f"size {list(x.shape)} in {len(x.shards_metadata())} shards" for x in (first, second)
        )
        raise ShardError(
            f"{name}: ShardedTensors of {first_text} and of {second_text} are sharded differently: reshard one to the "
            "other's spec with b.reshard(a.sharding_spec())"
        )
    # A rank without shards calls the function on examples, so that it raises the same errors about dtypes.
    return all(on_shards(func, first, (first, second), {}).values)
