"""Validate a rank's local shards."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from shardwright import comm
from shardwright.errors import ArgumentTypeError, ShardError, UnsupportedError
from shardwright.sharded.base.tensor_base import ShardedTensorBase
from shardwright.sharded.metadata.owners import same_device
from shardwright.sharded.metadata.properties import TensorProperties, has_memory_format, memory_format_of
from shardwright.sharded.metadata.shard import Shard
from shardwright.sharded.metadata.tensor_metadata import ShardMetadata
from shardwright.tensor import DTensor

__all__ = ["check_kinds", "check_shards", "common_properties", "has_nested", "refuse_nested", "refuse_sparse"]


def check_kinds(shards: Any) -> None:
    """Raise unless this is a list of `Shard`s with tensors and metadata: a `Shard` is mutable."""
    if not isinstance(shards, Sequence):
        raise ArgumentTypeError(f"local shards must be a list of sharded.Shard, got {type(shards).__name__}")
    for shard in shards:
        if not isinstance(shard, Shard):
            raise ArgumentTypeError(f"expected a sharded.Shard, got {type(shard).__name__}")
        if not isinstance(shard.tensor, Tensor) or not isinstance(shard.metadata, ShardMetadata):
            raise ArgumentTypeError(
                "a Shard must have a torch.Tensor and a sharded.ShardMetadata, got "
                f"{type(shard.tensor).__name__} and {type(shard.metadata).__name__}"
            )


def common_properties(shards: Sequence[Shard], rank: int) -> tuple[TensorProperties | None, bool]:
    """Return the properties that a rank's shards have in common, or None if it has none. Raise if they differ.

    The second result is True if all shards are both contiguous and channels last, as with one channel: then other
    ranks decide the memory format.
    """
    common: TensorProperties | None = None
    either = True
    for number, shard in enumerate(shards):
        shard_name = f"rank {rank}, shard {number}"
        if shard.tensor.layout != torch.strided:
            raise ShardError(
                f"{shard_name}: shards must be strided tensors, got layout {shard.tensor.layout}: call to_dense()"
            )
        if not isinstance(shard.tensor, ShardedTensorBase) and memory_format_of(shard.tensor) is None:
            raise ShardError(
                f"{shard_name}: size {list(shard.tensor.shape)} with strides {list(shard.tensor.stride())} is neither "
                "contiguous nor channels last: call contiguous()"
            )
        properties = _properties(shard.tensor)
        if common is None:
            common = properties
        elif either and not _has_both_formats(shard.tensor):
            common = replace(common, memory_format=properties.memory_format)
        _compare(shard_name, shard.tensor, common, f"shard 0 of rank {rank}")
        either = either and _has_both_formats(shard.tensor)
    return common, either


def check_shards(shards: Sequence[Shard], rank: int, properties: TensorProperties | None = None) -> None:
    """Raise unless each tensor matches its metadata, its placement and `properties`."""
    for number, shard in enumerate(shards):
        shard_name = f"rank {rank}, shard {number}"
        tensor, metadata = shard.tensor, shard.metadata
        if list(tensor.shape) != metadata.shard_sizes:
            raise ShardError(
                f"{shard_name}: the tensor has size {list(tensor.shape)}, but its metadata says {metadata.shard_sizes}"
            )
        if metadata.placement is not None:
            device = metadata.placement.device()
            if not same_device(device, tensor.device):
                raise ShardError(
                    f"{shard_name}: the tensor is on {tensor.device}, but its placement is {metadata.placement}"
                )
            owner = metadata.placement.rank()
            if owner is None and (name := metadata.placement.worker_name()) is not None:
                owner = comm.rank_of_worker(name)
            if owner is not None and owner != rank:
                raise ShardError(
                    f"{shard_name}: placement {metadata.placement} belongs to rank {owner}: pass only this "
                    "rank's own shards"
                )
        if properties is not None:
            _compare(shard_name, tensor, properties, "the tensor's metadata")


def has_nested(shards: Sequence[Shard]) -> bool:
    """True if any of these shards is itself sharded."""
    return any(isinstance(shard.tensor, ShardedTensorBase | DTensor) for shard in shards)


def refuse_nested(tensor: ShardedTensorBase, what: str) -> None:
    """Raise, identically on all ranks, if shards are themselves sharded: the metadata lacks their boxes."""
    if tensor._nested or has_nested(tensor._local_shards):
        raise UnsupportedError(
            f"{what}: shards of this ShardedTensor of size {list(tensor.shape)} are themselves sharded: flatten it "
            "first with sharded.flatten_sharded_tensors(tensor)"
        )


def _properties(tensor: Tensor) -> TensorProperties:
    if isinstance(tensor, ShardedTensorBase):  # a nested shard has metadata of its own
        return tensor.metadata().tensor_properties
    return TensorProperties.create_from_tensor(tensor)


def _has_both_formats(tensor: Tensor) -> bool:
    if isinstance(tensor, ShardedTensorBase | DTensor):
        return False
    return has_memory_format(tensor, torch.contiguous_format) and has_memory_format(tensor, torch.channels_last)


def _compare(shard_name: str, tensor: Tensor, expected: TensorProperties, source: str) -> None:
    properties = _properties(tensor)
    for name in ("dtype", "layout", "requires_grad", "pin_memory"):
        actual, expected_value = getattr(properties, name), getattr(expected, name)
        if actual != expected_value:
            raise ShardError(f"{shard_name}: {name} is {actual}, but {expected_value} in {source}")
    if properties.memory_format == expected.memory_format or _has_both_formats(tensor):
        return
    if torch.channels_last in (properties.memory_format, expected.memory_format):
        raise ShardError(
            f"{shard_name}: memory format is {properties.memory_format}, but {expected.memory_format} in {source}"
        )


def refuse_sparse(tensor: ShardedTensorBase, what: str) -> None:
    """Raise if the shards are sparse, as gradients of `embedding(..., sparse=True)` are."""
    if tensor.layout != torch.strided:
        raise UnsupportedError(
            f"{what}: shards of this ShardedTensor of size {list(tensor.shape)} are {tensor.layout}, and only strided "
            "shards can be transferred: call to_dense() first"
        )
