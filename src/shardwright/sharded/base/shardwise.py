"""A torch function called on each local shard, and the ShardedTensor of what it gave.

A rank without shards has nothing to call it on, and must still find the same dtype, the same requires_grad and the
same errors as the others: it calls the function on examples without elements.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from shardwright.errors import MixedTensorsError, ShardError
from shardwright.sharded.base.registry import name_of, unsupported
from shardwright.sharded.base.tensor_base import ShardedTensorBase
from shardwright.sharded.metadata.shard import Shard
from shardwright.sharded.metadata.tensor_metadata import ShardedTensorMetadata, ShardMetadata

__all__ = [
    "Given",
    "check_operands",
    "kind_of",
    "made_like",
    "on_shards",
    "recut",
    "recut_shard",
    "tensors_in",
    "whole_of",
]


class Given(NamedTuple):
    """What a function gave: a value for each local shard, one of them or of an example, and whether it gave back the
    very tensors of its first operand."""

    values: list[Any]
    sample: Any
    same: bool


def tensors_in(*values: Any) -> Iterator[Tensor]:
    """The tensors among arguments, lists of them included."""
    for value in values:
        if isinstance(value, Tensor):
            yield value
        elif isinstance(value, list | tuple):
            yield from tensors_in(*value)


def check_operands(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> ShardedTensorBase:
    """The first ShardedTensor among the arguments; all of them must be cut alike, and no other tensor beside them.

    A plain tensor without dimensions is a number, as long as nobody wants its gradient: that would be of one rank.
    """
    first: ShardedTensorBase | None = None
    for tensor in tensors_in(*args, *kwargs.values()):
        if isinstance(tensor, ShardedTensorBase):
            first = first if first is not None else tensor
            if not first._is_cut_like(tensor):
                raise ShardError(
                    f"{name_of(func)}: {first!r} and {tensor!r} are not cut alike, so their shards do not lie on top "
                    "of each other: bring one to the other's spec with b.reshard(a.sharding_spec())"
                )
    assert first is not None  # a function gets here by one of its arguments
    for tensor in tensors_in(*args, *kwargs.values()):
        if not isinstance(tensor, ShardedTensorBase) and (tensor.ndim or tensor.requires_grad):
            raise MixedTensorsError(
                f"{name_of(func)}: a plain tensor of size {list(tensor.shape)}{_wants_grad(tensor)} beside {first!r}: "
                "cut it alike with a.sharding_spec().shard(tensor), or use a number or a 0-dim tensor without gradient"
            )
    return first


def _wants_grad(tensor: Tensor) -> str:
    return ", which requires grad," if tensor.requires_grad else ""


def on_shards(func: Callable[..., Any], first: ShardedTensorBase, args: Sequence[Any], kwargs: dict[str, Any]) -> Given:
    """What the function gives for each local shard of its operands, which are cut alike."""
    mine = [shard.tensor for shard in first._local_shards]
    values = []
    for number in range(len(mine)):
        pick = lambda tensor, number=number: tensor._local_shards[number].tensor  # noqa: E731  # bound to its number
        values.append(func(*_swap(args, pick), **_swap(kwargs, pick)))
    if mine:
        return Given(values, values[0], all(value is tensor for value, tensor in zip(values, mine, strict=True)))
    examples: dict[int, Tensor] = {}

    def example(tensor: ShardedTensorBase) -> Tensor:
        return examples.setdefault(id(tensor), _example(tensor))

    sample = func(*_swap(args, example), **_swap(kwargs, example))
    return Given([], sample, sample is examples.get(id(first)))


def _swap(value: Any, local: Callable[[ShardedTensorBase], Tensor]) -> Any:
    """The arguments with a local tensor in the place of each ShardedTensor."""
    if isinstance(value, ShardedTensorBase):
        return local(value)
    if isinstance(value, dict):
        return {key: _swap(item, local) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return type(value)([_swap(item, local) for item in value])
    return value


def kind_of(tensor: ShardedTensorBase) -> Tensor:
    """A plain tensor without elements that answers for the shards: of their dtype and layout, on their device."""
    if tensor.layout == torch.strided:
        return torch.empty(0, dtype=tensor.dtype, device=tensor.device)
    return torch.empty([0] * tensor.ndim, dtype=tensor.dtype, layout=tensor.layout, device=tensor.device)


def _example(tensor: ShardedTensorBase) -> Tensor:
    """A tensor with no elements and the same place in the graph; of 0 dimensions it has one."""
    return _in_graph(torch.zeros([0] * tensor.ndim, dtype=tensor.dtype, device=tensor.device), tensor)


def whole_of(tensor: ShardedTensorBase) -> Tensor:
    """A tensor of the whole size, without memory: what a function makes of it says size, dtype and requires_grad.

    One without elements is a real one: of a meta tensor, torch does not say what it would not do with nothing.
    """
    device = "meta" if tensor.shape.numel() else tensor.device
    return _in_graph(torch.empty(tensor.shape, dtype=tensor.dtype, device=device), tensor)


def _in_graph(plain: Tensor, tensor: ShardedTensorBase) -> Tensor:
    if not tensor.requires_grad:
        return plain
    plain.requires_grad_()
    if tensor.is_leaf:
        return plain
    with torch.enable_grad():
        return plain.clone()


def made_like(
    func: Any, first: ShardedTensorBase, values: Sequence[Tensor], sample: Tensor, device: torch.device | None = None
) -> ShardedTensorBase:
    """A tensor cut like `first`, of what the function gave for its shards; `device` where it lies on another kind."""
    if sample.device.type not in (first.device.type, "meta"):
        raise unsupported(func, f"its shards would move to {sample.device}, where their placements do not say: use .to")
    made = first._with(values, requires_grad=sample.requires_grad, dtype=sample.dtype, device=device)
    made._leaf = sample.is_leaf
    properties = made._metadata.tensor_properties
    properties.pin_memory = properties.pin_memory and sample._is_view()  # what is computed lies in fresh memory
    return made


def recut(
    first: ShardedTensorBase, values: Sequence[Tensor], sample: Tensor, origins: Sequence[int | None]
) -> ShardedTensorBase:
    """A tensor of what a function gave for each shard, where it gave other dimensions.

    `sample` has the size of the whole result; `origins` names, for each dimension of it, the one of `first` that is cut
    in the same way, or None for one that no shard cuts.
    """

    def moved(shard: ShardMetadata) -> ShardMetadata:
        return recut_shard(shard, sample.shape, origins)

    properties = replace(
        first._metadata.tensor_properties,
        dtype=sample.dtype,
        requires_grad=sample.requires_grad,
        memory_format=torch.contiguous_format,
    )
    metadata = ShardedTensorMetadata(
        [moved(shard) for shard in first._metadata.shards_metadata], sample.shape, properties
    )
    own = [Shard(value, moved(shard.metadata)) for value, shard in zip(values, first._local_shards, strict=True)]
    made = first._made_like(metadata, own)
    made._spec, made._leaf = None, sample.is_leaf
    return made


def recut_shard(shard: ShardMetadata, size: Sequence[int], origins: Sequence[int | None]) -> ShardMetadata:
    """What becomes of a shard's box in a result of this size; see `recut`."""
    kept = list(zip(origins, size, strict=True))
    return ShardMetadata(
        [0 if dim is None else shard.shard_offsets[dim] for dim, _ in kept],
        [extent if dim is None else shard.shard_sizes[dim] for dim, extent in kept],
        shard.placement,
    )
