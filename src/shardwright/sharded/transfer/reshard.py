"""`reshard`: replace the shards of a tensor by those of another spec."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from shardwright import comm
from shardwright.layout import RegionTable
from shardwright.sharded.base.checks import refuse_nested, refuse_sparse
from shardwright.sharded.base.tensor_base import ShardedTensorBase
from shardwright.sharded.metadata.digest import digest
from shardwright.sharded.metadata.owners import owner_in
from shardwright.sharded.metadata.properties import TensorProperties, empty_of
from shardwright.sharded.metadata.shard import Shard
from shardwright.sharded.metadata.spec import ShardingSpec, metadata_for
from shardwright.sharded.metadata.tensor_metadata import ShardedTensorMetadata, ShardMetadata
from shardwright.sharded.transfer.transfer import ShardTransfer

__all__ = ["reshard"]


def reshard(tensor: ShardedTensorBase, spec: ShardingSpec) -> None:
    """See `ShardedTensor.reshard`."""
    group = tensor._group
    recording = tensor.requires_grad and torch.is_grad_enabled()

    def prepare() -> tuple[tuple[ShardedTensorMetadata, RegionTable], str, bytes]:
        refuse_nested(tensor, "reshard")
        refuse_sparse(tensor, "reshard")
        metadata = metadata_for(spec, tensor.shape, tensor._metadata.tensor_properties)
        table = metadata.table(owner_in(group))
        gradients = "with gradients" if recording else "without gradients"
        description = f"{digest(tensor._table)} of {tensor.dtype} to {digest(table)} {gradients}"
        return (metadata, table), description, b"leaves" if tensor.is_leaf else b"a history"

    (metadata, table), messages = comm.agree(prepare, what="reshard", group=group, same=True, gather=True, unwrap=True)
    tensor._leaf = all(message == b"leaves" for message in messages)  # a rank without shards may not have known
    if metadata.shards_metadata == tensor._metadata.shards_metadata:
        tensor._spec = spec
        return
    new_shards = [metadata.shards_metadata[number] for number in (table.ranks == group.global_rank).nonzero()[0]]
    differentiable = recording and not tensor._leaf
    properties = replace(
        metadata.tensor_properties,
        requires_grad=differentiable or (tensor.requires_grad and tensor._leaf),
        pin_memory=metadata.tensor_properties.pin_memory and not differentiable and _in_host_memory(metadata),
    )
    pieces = _moved(tensor, new_shards, ShardTransfer(tensor._table, table, group), properties, differentiable)
    if not differentiable:
        pieces = [piece.requires_grad_(properties.requires_grad) for piece in pieces]
        tensor._leaf = True
    tensor._local_shards = [Shard(piece, shard) for piece, shard in zip(pieces, new_shards, strict=True)]
    tensor._metadata, tensor._spec = replace(metadata, tensor_properties=properties), spec
    tensor.__dict__["_table"] = table


def _moved(
    tensor: ShardedTensorBase,
    new_shards: Sequence[ShardMetadata],
    transfer: ShardTransfer,
    properties: TensorProperties,
    differentiable: bool,
) -> list[Tensor]:
    """Return this rank's new shards, filled from its old shards and other ranks."""
    local_tensors = [shard.tensor for shard in tensor._local_shards]
    devices = [_device(shard, tensor.device) for shard in new_shards]
    device_here = local_tensors[0].device if local_tensors else (*devices, tensor.device)[0]
    like = torch.empty(0, dtype=tensor.dtype, device=device_here)
    if differentiable:
        moved = transfer.apply(local_tensors, like)
    else:
        # Values arrive on the device of the old shards and are copied to another device below, if needed.
        staging = replace(properties, pin_memory=False)
        choices = [properties if device == device_here else staging for device in devices]
        out = [
            empty_of(choice, shard.shard_sizes, device_here) for choice, shard in zip(choices, new_shards, strict=True)
        ]
        moved = transfer.run(local_tensors, like, out)
    if properties.memory_format == torch.channels_last:
        moved = [piece.contiguous(memory_format=torch.channels_last) for piece in moved]
    placed = [piece.to(device) for piece, device in zip(moved, devices, strict=True)]
    return [piece.pin_memory() if properties.pin_memory and not piece.is_pinned() else piece for piece in placed]


def _device(shard: ShardMetadata, current: torch.device) -> torch.device:
    """Return the device of the new shard; a placement without index means the known device, if of its type."""
    device = current if shard.placement is None else shard.placement.device()
    return current if device == torch.device(current.type) else device


def _in_host_memory(metadata: ShardedTensorMetadata) -> bool:
    placements = {shard.placement for shard in metadata.shards_metadata}
    return all(placement is None or placement.device().type == "cpu" for placement in placements)
