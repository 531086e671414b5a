"""What a rank's own shards are held against, before anything is built from them."""

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
from shardwright.sharded.metadata.properties import TensorProperties, lies_as, memory_format_of
from shardwright.sharded.metadata.shard import Shard
from shardwright.sharded.metadata.tensor_metadata import ShardMetadata
from shardwright.tensor import DTensor

__all__ = ["check_kinds", "check_shards", "common_properties", "has_nested", "refuse_nested", "refuse_sparse"]


def check_kinds(shards: Any) -> None:
    """Sees that it is a list of shards, of tensors: a `Shard` can be changed after it was made."""
    if not isinstance(shards, Sequence):
        raise ArgumentTypeError(f"local shards: {type(shards).__name__} is not a list of sharded.Shard")
    for shard in shards:
        if not isinstance(shard, Shard):
            raise ArgumentTypeError(f"{type(shard).__name__} is not a sharded.Shard")
        if not isinstance(shard.tensor, Tensor) or not isinstance(shard.metadata, ShardMetadata):
            raise ArgumentTypeError(
                f"a Shard of a {type(shard.tensor).__name__} and a {type(shard.metadata).__name__}: a torch.Tensor and "
                "a sharded.ShardMetadata are needed"
            )


def common_properties(shards: Sequence[Shard], rank: int) -> tuple[TensorProperties | None, bool]:
    """The properties that a rank's shards share, or None where it has none; they must share them.

    Also whether these shards lie in memory both ways, contiguous and channels last, as those of one channel do: then
    other ranks may say which it is.
    """
    found: TensorProperties | None = None
    either = True
    for number, shard in enumerate(shards):
        here = f"rank {rank}, shard {number}"
        if shard.tensor.layout != torch.strided:
            raise ShardError(f"{here}: layout {shard.tensor.layout}: shards are strided tensors; call to_dense()")
        if not isinstance(shard.tensor, ShardedTensorBase) and memory_format_of(shard.tensor) is None:
            raise ShardError(
                f"{here}: sizes {list(shard.tensor.shape)} with strides {list(shard.tensor.stride())} are neither "
                "contiguous nor channels last: call contiguous()"
            )
        own = _properties(shard.tensor)
        if found is None:
            found = own
        elif either and not _lies_both_ways(shard.tensor):
            found = replace(found, memory_format=own.memory_format)
        _compare(here, shard.tensor, found, f"shard 0 of rank {rank}")
        either = either and _lies_both_ways(shard.tensor)
    return found, either


def check_shards(shards: Sequence[Shard], rank: int, properties: TensorProperties | None = None) -> None:
    """Sees that each tensor is what its metadata and `properties` say, and lies where its placement says."""
    for number, shard in enumerate(shards):
        here = f"rank {rank}, shard {number}"
        tensor, metadata = shard.tensor, shard.metadata
        if list(tensor.shape) != metadata.shard_sizes:
            raise ShardError(f"{here}: a tensor of size {list(tensor.shape)} for shard sizes {metadata.shard_sizes}")
        if metadata.placement is not None:
            wanted = metadata.placement.device()
            if not same_device(wanted, tensor.device):
                raise ShardError(f"{here}: a tensor on {tensor.device} for placement {metadata.placement}")
            owner = metadata.placement.rank()
            if owner is None and (name := metadata.placement.worker_name()) is not None:
                owner = comm.rank_of_worker(name)
            if owner is not None and owner != rank:
                raise ShardError(
                    f"{here}: placement {metadata.placement} names rank {owner}: give a rank its own shards"
                )
        if properties is not None:
            _compare(here, tensor, properties, "the tensor's metadata")


def has_nested(shards: Sequence[Shard]) -> bool:
    """Whether some of these shards are sharded themselves."""
    return any(isinstance(shard.tensor, ShardedTensorBase | DTensor) for shard in shards)


def refuse_nested(tensor: ShardedTensorBase, what: str) -> None:
    """Raises, alike on all ranks, where shards are sharded themselves: their boxes are not those of the metadata."""
    if tensor._nested or has_nested(tensor._local_shards):
        raise UnsupportedError(
            f"{what}: shards of this ShardedTensor of size {list(tensor.shape)} are themselves sharded: make all "
            "regions explicit first, with sharded.flatten_sharded_tensors(tensor)"
        )


def _properties(tensor: Tensor) -> TensorProperties:
    if isinstance(tensor, ShardedTensorBase):  # a shard that is cut again: its own metadata says what it is
        return tensor.metadata().tensor_properties
    return TensorProperties.create_from_tensor(tensor)


def _lies_both_ways(tensor: Tensor) -> bool:
    if isinstance(tensor, ShardedTensorBase | DTensor):
        return False
    return lies_as(tensor, torch.contiguous_format) and lies_as(tensor, torch.channels_last)


def _compare(here: str, tensor: Tensor, wanted: TensorProperties, whose: str) -> None:
    own = _properties(tensor)
    for name in ("dtype", "layout", "requires_grad", "pin_memory"):
        mine, theirs = getattr(own, name), getattr(wanted, name)
        if mine != theirs:
            raise ShardError(f"{here}: {name} is {mine}, and {theirs} in {whose}")
    if own.memory_format == wanted.memory_format or _lies_both_ways(tensor):
        return
    if torch.channels_last in (own.memory_format, wanted.memory_format):
        raise ShardError(f"{here}: memory format is {own.memory_format}, and {wanted.memory_format} in {whose}")


def refuse_sparse(tensor: ShardedTensorBase, what: str) -> None:
    """Raises where the shards are not strided, as gradients of `embedding(..., sparse=True)` are not: they stay."""
    if tensor.layout != torch.strided:
        raise UnsupportedError(
            f"{what}: shards of this ShardedTensor of size {list(tensor.shape)} are {tensor.layout}, and only strided "
            "ones travel: call to_dense() first"
        )
