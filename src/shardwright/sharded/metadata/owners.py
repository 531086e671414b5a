"""Resolve a shard's placement to the global rank that owns it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from copy import copy

import torch

from shardwright import comm
from shardwright.errors import PlacementError
from shardwright.sharded.metadata.process_group import listed
from shardwright.sharded.metadata.remote_device import RemoteDevice
from shardwright.sharded.metadata.tensor_metadata import ShardMetadata

__all__ = ["moved_to", "owner_in", "placed", "same_device"]


def owner_in(group: comm.Group) -> Callable[[RemoteDevice | None], int]:
    """Return a function from placements to global ranks; it raises if the rank is not in the group."""
    members = frozenset(group.ranks)

    def owner(placement: RemoteDevice | None) -> int:
        rank = None if placement is None else placement.rank()
        if rank is None and placement is not None and (name := placement.worker_name()) is not None:
            rank = comm.rank_of_worker(name)
        if rank is None:
            if group.size > 1:
                raise PlacementError(
                    f"placement {placement} names no rank, but the group has {group.size} ranks: write rank:0/cpu"
                )
            return group.ranks[0]
        if rank not in members:
            raise PlacementError(f"placement {placement}: rank {rank} is not in the group of {listed(group.ranks)}")
        return rank

    return owner


def same_device(requested: torch.device, actual: torch.device) -> bool:
    """True if the devices match; a device without an index matches every index."""
    return requested.type == actual.type and (
        requested.index is None or actual.index is None or requested.index == actual.index
    )


def placed(shard: ShardMetadata, device: torch.device) -> ShardMetadata:
    """Return the shard with its placement on this device of the same rank; itself if nothing changes."""
    if shard.placement is None or shard.placement.device() == device:
        return shard
    moved = copy(shard)
    moved.placement = shard.placement.on(device)
    return moved


def moved_to(device: torch.device, shards: Sequence[ShardMetadata]) -> list[ShardMetadata]:
    """Return the shards with placements on this device type, without an index: that differs between ranks.

    >>> moved_to(torch.device("cuda:1"), [ShardMetadata([0], [4], "rank:1/cpu")])[0].placement
    RemoteDevice('rank:1/cuda')
    """
    kind = torch.device(device.type)
    return [
        shard if shard.placement is None or shard.placement.device().type == kind.type else placed(shard, kind)
        for shard in shards
    ]
