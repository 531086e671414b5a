"""Whose a shard is: the global rank that a placement names, among the ranks of a group."""

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
    """A function from placements to global ranks of this group; it refuses a placement that names none of them."""
    members = frozenset(group.ranks)

    def owner(placement: RemoteDevice | None) -> int:
        rank = None if placement is None else placement.rank()
        if rank is None and placement is not None and (name := placement.worker_name()) is not None:
            rank = comm.rank_of_worker(name)
        if rank is None:
            if group.size > 1:
                raise PlacementError(
                    f"placement {placement} names no rank, and {group.size} ranks share the tensor: write rank:0/cpu"
                )
            return group.ranks[0]
        if rank not in members:
            raise PlacementError(f"placement {placement}: rank {rank} is not in the group of {listed(group.ranks)}")
        return rank

    return owner


def same_device(wanted: torch.device, actual: torch.device) -> bool:
    """Whether a tensor on `actual` lies where `wanted` says; a device without a number is any of its kind."""
    return wanted.type == actual.type and (wanted.index is None or actual.index is None or wanted.index == actual.index)


def placed(shard: ShardMetadata, device: torch.device) -> ShardMetadata:
    """The shard on this device of the rank that owns it: itself, where it is there, or where it has no placement."""
    if shard.placement is None or shard.placement.device() == device:
        return shard
    moved = copy(shard)
    moved.placement = shard.placement.on(device)
    return moved


def moved_to(device: torch.device, shards: Sequence[ShardMetadata]) -> list[ShardMetadata]:
    """The shards on devices of this kind. Which of them it is is each rank's own matter: those that move name none.

    >>> moved_to(torch.device("cuda:1"), [ShardMetadata([0], [4], "rank:1/cpu")])[0].placement
    RemoteDevice('rank:1/cuda')
    """
    kind = torch.device(device.type)
    return [
        shard if shard.placement is None or shard.placement.device().type == kind.type else placed(shard, kind)
        for shard in shards
    ]
