"""`scatter`: shard a plain tensor of one rank."""

from __future__ import annotations

from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor

from shardwright import comm
from shardwright.errors import ArgumentTypeError, PlacementError, ShardError
from shardwright.layout import RegionTable
from shardwright.sharded.base.tensor_base import ShardedTensorBase
from shardwright.sharded.metadata.digest import digest
from shardwright.sharded.metadata.process_group import group_of
from shardwright.sharded.metadata.properties import TensorProperties
from shardwright.sharded.metadata.shard import Shard
from shardwright.sharded.metadata.spec import ShardingSpec, metadata_for
from shardwright.sharded.metadata.tensor_metadata import ShardedTensorMetadata
from shardwright.sharded.transfer.transfer import ShardTransfer
from shardwright.tensor import DTensor

__all__ = ["scatter"]

T = TypeVar("T", bound=ShardedTensorBase)


def scatter(cls: type[T], tensor: Tensor, spec: ShardingSpec, src_rank: int, process_group: Any) -> T:
    """See `ShardingSpec.shard`."""
    group = group_of(process_group)
    rank = group.global_rank

    def prepare() -> tuple[T, str]:
        if not isinstance(tensor, Tensor) or isinstance(tensor, ShardedTensorBase | DTensor):
            raise ArgumentTypeError(
                f"shard: expected a plain tensor, got {type(tensor).__name__}; use reshard(spec) of a ShardedTensor, "
                "and sharded.from_dtensor for a DTensor"
            )
        if tensor.layout != torch.strided:
            raise ShardError(f"shard: the tensor must be strided, got layout {tensor.layout}: call to_dense()")
        if src_rank not in group.ranks:
            raise PlacementError(f"shard: src_rank {src_rank} is not in the group of ranks {list(group.ranks)}")
        if tensor.is_meta and rank == src_rank and not _is_meta(metadata_for(spec, tensor.shape, TensorProperties())):
            raise ShardError(
                f"shard: the tensor of the source rank {rank} is a meta tensor, which has no values to scatter"
            )
        properties = TensorProperties(tensor.dtype, requires_grad=tensor.requires_grad)
        result = cls._bind(metadata_for(spec, tensor.shape, properties), spec, (), group)
        needs = "requires_grad" if tensor.requires_grad else "no gradient"
        description = (
            f"{list(tensor.shape)} of {tensor.dtype}, {needs}, from rank {src_rank}, split into {digest(result._table)}"
        )
        return result, description

    result = comm.agree(prepare, what="shard", group=group, same=True, unwrap=True)
    shards = result._local_metadata()
    size = tuple(tensor.shape)
    source = RegionTable(np.array([src_rank]), np.zeros((1, len(size)), np.int64), np.array([size], np.int64))
    if _is_meta(result.metadata()):
        pieces = [torch.empty(shard.shard_sizes, dtype=tensor.dtype, device="meta") for shard in shards]
    else:
        pieces = ShardTransfer(source, result._table, group).run(
            [tensor] if rank == src_rank else [], _like(tensor, result)
        )
    result._local_shards = [
        Shard(piece if placement is None else piece.to(placement.device()), shard)
        for piece, shard, placement in zip(pieces, shards, (shard.placement for shard in shards), strict=True)
    ]
    return result.requires_grad_(tensor.requires_grad)


def _is_meta(metadata: ShardedTensorMetadata) -> bool:
    """True if all shards are on the meta device."""
    placements = [shard.placement for shard in metadata.shards_metadata]
    return all(placement is not None and placement.device().type == "meta" for placement in placements)


def _like(tensor: Tensor, result: ShardedTensorBase) -> Tensor:
    """Return an example of dtype and device for this rank's shards; receiving ranks may pass a meta tensor."""
    if not tensor.is_meta:
        return tensor.detach()
    devices = [shard.placement.device() for shard in result._local_metadata() if shard.placement is not None]
    device = (*devices, result.device)[0]
    return torch.empty(0, dtype=tensor.dtype, device="cpu" if device.type == "meta" else device)
