"""`reshard`: other boxes, same values."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from shardwright.layout import RegionTable
from shardwright.sharded.agreement import digest, together
from shardwright.sharded.metadata import ShardedTensorMetadata
from shardwright.sharded.moving import Relocation
from shardwright.sharded.owners import owner_in
from shardwright.sharded.shard import Shard
from shardwright.sharded.spec import ShardingSpec, metadata_for

if TYPE_CHECKING:
    from shardwright.sharded.tensor import ShardedTensor

__all__ = ["reshard"]


def reshard(tensor: ShardedTensor, spec: ShardingSpec) -> None:
    """See `ShardedTensor.reshard`."""
    group = tensor._group
    differentiable = tensor.requires_grad and not tensor.is_leaf and torch.is_grad_enabled()

    def prepare() -> tuple[tuple[ShardedTensorMetadata, RegionTable], str]:
        metadata = metadata_for(spec, tensor.shape, tensor._metadata.tensor_properties)
        table = metadata.table(owner_in(group))
        how = "with gradients" if differentiable else "without gradients"
        return (metadata, table), f"{digest(tensor._table)} of {tensor.dtype} to {digest(table)} {how}"

    metadata, table = together(prepare, "reshard", group)
    held = [shard.tensor for shard in tensor._local_shards]
    own = [metadata.shards_metadata[number] for number in (table.ranks == group.ranks[group.rank]).nonzero()[0]]
    devices = [tensor.device if shard.placement is None else shard.placement.device() for shard in own]
    like = torch.empty(0, dtype=tensor.dtype, device=held[0].device if held else (*devices, tensor.device)[0])
    relocation = Relocation(tensor._table, table, group)
    moved = relocation.apply(held, like) if differentiable else relocation.run(held, like)
    moved = [piece.to(device) for piece, device in zip(moved, devices, strict=True)]
    if not differentiable:
        moved = [piece.requires_grad_(tensor.requires_grad) for piece in moved]
        tensor._leaf = True
    tensor._local_shards = [Shard(piece, shard) for piece, shard in zip(moved, own, strict=True)]
    tensor._metadata, tensor._spec = metadata, spec
    tensor.__dict__["_table"] = table
