"""Call a torch function on each local shard and build a ShardedTensor from the results.

A rank without shards must arrive at the same dtype, requires_grad and errors as the others: it calls the function on
empty example tensors.
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
    "ShardResults",
    "check_operands",
    "empty_shard",
    "global_meta",
    "map_shard",
    "on_shards",
    "result_like",
    "result_with_dims",
    "tensors_in",
]


class ShardResults(NamedTuple):
    """The results of a function: one per local shard; a sample (the first, or that of an example); and whether it
    returned its first operand's own tensors."""

    values: list[Any]
    sample: Any
    unchanged: bool


def tensors_in(*values: Any) -> Iterator[Tensor]:
    """Yield the tensors among the arguments, including those in lists."""
    for value in values:
        if isinstance(value, Tensor):
            yield value
        elif isinstance(value, list | tuple):
            yield from tensors_in(*value)


def check_operands(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> ShardedTensorBase:
    """Return the first ShardedTensor. Raise unless all have the same sharding and no other tensor is mixed in.

    A plain 0-dimensional tensor counts as a number unless it requires grad: its gradient would be local to one rank.
    """
    first: ShardedTensorBase | None = None
    for tensor in tensors_in(*args, *kwargs.values()):
        if isinstance(tensor, ShardedTensorBase):
            first = first if first is not None else tensor
            if not first._has_same_shards(tensor):
                raise ShardError(
                    f"{name_of(func)}: {first!r} and {tensor!r} are sharded differently: reshard one to the other's "
                    "spec with b.reshard(a.sharding_spec())"
                )
    assert first is not None  # dispatch requires at least one ShardedTensor
    for tensor in tensors_in(*args, *kwargs.values()):
        if not isinstance(tensor, ShardedTensorBase) and (tensor.ndim or tensor.requires_grad):
            raise MixedTensorsError(
                f"{name_of(func)}: cannot mix a plain tensor of size {list(tensor.shape)}{_requires_grad(tensor)} with "
                f"{first!r}: shard it with a.sharding_spec().shard(tensor), or use a number or a 0-dim tensor without "
                "gradient"
            )
    return first


def _requires_grad(tensor: Tensor) -> str:
    return ", which requires grad," if tensor.requires_grad else ""


def on_shards(
    func: Callable[..., Any], first: ShardedTensorBase, args: Sequence[Any], kwargs: dict[str, Any]
) -> ShardResults:
    """Call the function on each local shard of its operands, which have the same sharding."""
    local = [shard.tensor for shard in first._local_shards]
    values = []
    for index in range(len(local)):
        pick = lambda tensor, index=index: tensor._local_shards[index].tensor  # noqa: E731  # bound to its index
        values.append(func(*_swap(args, pick), **_swap(kwargs, pick)))
    if local:
        return ShardResults(
            values, values[0], all(value is tensor for value, tensor in zip(values, local, strict=True))
        )
    examples: dict[int, Tensor] = {}

    def example(tensor: ShardedTensorBase) -> Tensor:
        return examples.setdefault(id(tensor), _example(tensor))

    sample = func(*_swap(args, example), **_swap(kwargs, example))
    return ShardResults([], sample, sample is examples.get(id(first)))


def _swap(value: Any, local: Callable[[ShardedTensorBase], Tensor]) -> Any:
    """Replace each ShardedTensor among the arguments by a local tensor."""
    if isinstance(value, ShardedTensorBase):
        return local(value)
    if isinstance(value, dict):
        return {key: _swap(item, local) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return type(value)([_swap(item, local) for item in value])
    return value


def empty_shard(tensor: ShardedTensorBase) -> Tensor:
    """Return an empty plain tensor with the dtype, layout and device of the shards."""
    if tensor.layout == torch.strided:
        return torch.empty(0, dtype=tensor.dtype, device=tensor.device)
    return torch.empty([0] * tensor.ndim, dtype=tensor.dtype, layout=tensor.layout, device=tensor.device)


def _example(tensor: ShardedTensorBase) -> Tensor:
    """Return an empty tensor (0-dimensional: one element) with the same requires_grad and is_leaf."""
    return _in_graph(torch.zeros([0] * tensor.ndim, dtype=tensor.dtype, device=tensor.device), tensor)


def global_meta(tensor: ShardedTensorBase) -> Tensor:
    """Return a meta tensor of the global size: a function's result on it has the global size, dtype and requires_grad.

    If the tensor is empty, it is a real one, because torch's errors about empty tensors do not occur on meta.
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


def result_like(
    func: Any, first: ShardedTensorBase, values: Sequence[Tensor], sample: Tensor, device: torch.device | None = None
) -> ShardedTensorBase:
    """Return a tensor sharded like `first` with these results; `device` if they are on another device type."""
    if sample.device.type not in (first.device.type, "meta"):
        raise unsupported(func, f"its result is on {sample.device}, but the placements say otherwise: use .to")
    result = first._with(values, requires_grad=sample.requires_grad, dtype=sample.dtype, device=device)
    result._leaf = sample.is_leaf
    properties = result._metadata.tensor_properties
    properties.pin_memory = properties.pin_memory and sample._is_view()  # results are in newly allocated memory
    return result


def result_with_dims(
    first: ShardedTensorBase, values: Sequence[Tensor], sample: Tensor, origins: Sequence[int | None]
) -> ShardedTensorBase:
    """Return a tensor from results with other dimensions than `first`.

    `sample` has the global size of the result; `origins` gives, for each of its dimensions, the dimension of `first`
    that is sharded in the same way, or None if it is not sharded.
    """

    def moved(shard: ShardMetadata) -> ShardMetadata:
        return map_shard(shard, sample.shape, origins)

    properties = replace(
        first._metadata.tensor_properties,
        dtype=sample.dtype,
        requires_grad=sample.requires_grad,
        memory_format=torch.contiguous_format,
    )
    metadata = ShardedTensorMetadata(
        [moved(shard) for shard in first._metadata.shards_metadata], sample.shape, properties
    )
    shards = [Shard(value, moved(shard.metadata)) for value, shard in zip(values, first._local_shards, strict=True)]
    result = first._new_like(metadata, shards)
    result._spec, result._leaf = None, sample.is_leaf
    return result


def map_shard(shard: ShardMetadata, size: Sequence[int], origins: Sequence[int | None]) -> ShardMetadata:
    """Return the box of a shard in a result of this size; see `result_with_dims`."""
    dims = list(zip(origins, size, strict=True))
    return ShardMetadata(
        [0 if dim is None else shard.shard_offsets[dim] for dim, _ in dims],
        [extent if dim is None else shard.shard_sizes[dim] for dim, extent in dims],
        shard.placement,
    )
