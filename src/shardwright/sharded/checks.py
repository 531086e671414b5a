"""What a rank's own shards are held against, before anything is built from them."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from shardwright.errors import ShardError
from shardwright.sharded.base import ShardedTensorBase
from shardwright.sharded.owners import same_device
from shardwright.sharded.properties import TensorProperties, memory_format_of
from shardwright.sharded.shard import Shard

__all__ = ["check_shards", "common_properties"]


def common_properties(shards: Sequence[Shard], rank: int) -> TensorProperties | None:
    """The properties that a rank's shards share, or None where it has none; they must share them."""
    found: TensorProperties | None = None
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
        _compare(here, own, found, f"shard 0 of rank {rank}")
    return found


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
            if owner is not None and owner != rank:
                raise ShardError(
                    f"{here}: placement {metadata.placement} names rank {owner}: give a rank its own shards"
                )
        if properties is not None:
            _compare(here, _properties(tensor), properties, "the tensor's metadata")


def _properties(tensor: Tensor) -> TensorProperties:
    if isinstance(tensor, ShardedTensorBase):  # a shard that is cut again: its own metadata says what it is
        return tensor.metadata().tensor_properties
    return TensorProperties.create_from_tensor(tensor)


def _compare(here: str, own: TensorProperties, wanted: TensorProperties, whose: str) -> None:
    for name in ("dtype", "layout", "requires_grad", "pin_memory"):
        mine, theirs = getattr(own, name), getattr(wanted, name)
        if mine != theirs:
            raise ShardError(f"{here}: {name} is {mine}, and {theirs} in {whose}")
    if torch.channels_last in (own.memory_format, wanted.memory_format) and own.memory_format != wanted.memory_format:
        raise ShardError(f"{here}: memory format is {own.memory_format}, and {wanted.memory_format} in {whose}")
