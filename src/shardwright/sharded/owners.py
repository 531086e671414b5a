"""Whose a shard is: the global rank that a placement names, among the ranks of a group."""

from __future__ import annotations

from collections.abc import Callable

import torch

from shardwright import comm
from shardwright.errors import PlacementError
from shardwright.sharded.process_group import listed
from shardwright.sharded.remote_device import RemoteDevice

__all__ = ["owner_in", "same_device"]


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
