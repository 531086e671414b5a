"""`init_from_local_shards`: build a ShardedTensor from the shards of each rank."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import msgspec
import torch

from shardwright import comm
from shardwright.errors import DisagreementError, ShardError, ShardwrightError
from shardwright.layout import Region
from shardwright.layout.integers import integers
from shardwright.listing import join_first
from shardwright.sharded.base.checks import check_kinds, check_shards, common_properties, has_nested
from shardwright.sharded.metadata.owners import owner_in
from shardwright.sharded.metadata.process_group import group_of
from shardwright.sharded.metadata.properties import TensorProperties
from shardwright.sharded.metadata.shard import Shard
from shardwright.sharded.metadata.tensor_metadata import ShardedTensorMetadata, ShardMetadata
from shardwright.sharded.tensor import ShardedTensor
from shardwright.sharded.transfer.remote_shards import share_shards

__all__ = ["LocalDescription", "assemble", "init_from_local_shards"]


class LocalDescription(NamedTuple):
    """One rank's description of its shards; or, instead, what is wrong with them."""

    rank: int
    size: tuple[int, ...] = ()
    shards: tuple[dict[str, Any], ...] = ()
    properties: dict[str, Any] | None = None
    fault: str | None = None
    nested: tuple[int, ...] = ()  # indices of the shards that are themselves sharded
    leaf: bool = True  # True if all shards are leaves
    either: bool = False  # True if all shards are both contiguous and channels last


def init_from_local_shards(
    local_shards: Sequence[Shard], *global_size: Any, process_group: Any = None, init_rrefs: bool = False
) -> ShardedTensor:
    """Return a ShardedTensor of the shards that each rank passes: any number, also none. They are not copied.

    Collective: all ranks pass the same global size. Every problem is raised on all ranks: shards that overlap or leave
    a gap, a tensor that does not match its metadata, ranks that disagree. If the shards of any rank have autograd
    history, the tensor is not a leaf on any rank.

    >>> import torch
    >>> from shardwright import sharded
    >>> mine = [sharded.Shard.from_tensor_and_offsets(torch.ones(2, 3), [row, 0]) for row in (0, 2)]
    >>> sharded.init_from_local_shards(mine, 4, 3).sharding_spec()
    ChunkShardingSpec(dim=0, placements=[RemoteDevice('rank:0/cpu'), RemoteDevice('rank:0/cpu')])
    """
    group = group_of(process_group)
    rank = group.global_rank
    encoded = msgspec.json.encode(_describe(local_shards, global_size, rank))
    gathered = comm.gather_bytes(encoded, group, what="init_from_local_shards")
    descriptions = [msgspec.json.decode(message, type=LocalDescription) for message in gathered]
    metadata = assemble(descriptions)
    tensor = ShardedTensor._bind(metadata, None, local_shards, group)
    tensor._leaf = all(description.leaf for description in descriptions)
    tensor._nested = any(description.nested for description in descriptions)
    metadata.table(owner_in(group))  # raises if a placement names no rank of the group
    if init_rrefs:
        tensor._remote = share_shards(tensor, group)
    return tensor


def _describe(shards: Sequence[Shard], global_size: Sequence[Any], rank: int) -> LocalDescription:
    try:
        size = global_size[0] if len(global_size) == 1 and isinstance(global_size[0], Sequence) else global_size
        checked = integers(size, "global size")
        check_kinds(shards)
        properties, either = common_properties(shards, rank)
        check_shards(shards, rank)
        nested = tuple(number for number, shard in enumerate(shards) if has_nested([shard]))
        return LocalDescription(
            rank,
            checked,
            tuple(shard.metadata.to_json() for shard in shards),
            None if properties is None else properties.to_json(),
            nested=nested,
            leaf=all(shard.tensor.is_leaf for shard in shards),
            either=either,
        )
    except Exception as error:  # noqa: BLE001  # sent to the other ranks and raised on all
        text = str(error) if isinstance(error, ShardwrightError) else f"{type(error).__name__}: {error}"
        return LocalDescription(rank, fault=text if text.startswith(f"rank {rank}") else f"rank {rank}: {text}")


def assemble(descriptions: Sequence[LocalDescription]) -> ShardedTensorMetadata:
    """Return the metadata of the ranks' shards together, or raise the error that all ranks raise. Pure.

    >>> assemble([LocalDescription(0, (4,)), LocalDescription(1, (5,))])
    Traceback (most recent call last):
    shardwright.errors.DisagreementError: ranks disagree about the global size: rank 0 has (4,), rank 1 has (5,)
    """
    faults = [description.fault for description in descriptions if description.fault is not None]
    if faults:
        raise ShardError(join_first(faults, 8, "; "))
    _check_same("the global size", [(description.rank, description.size) for description in descriptions])
    with_shards = [description for description in descriptions if description.properties is not None]
    if not with_shards:
        raise ShardError(f"no rank holds a shard of a tensor of size {descriptions[0].size}: its dtype is unknown")
    # Shards that have both memory formats follow the others.
    sure = [description for description in with_shards if not description.either] or with_shards[:1]
    for name in ("dtype", "layout", "requires_grad", "memory_format", "pin_memory"):
        deciding = sure if name == "memory_format" else with_shards
        _check_same(
            name,
            [
                (description.rank, description.properties[name])
                for description in deciding
                if description.properties is not None
            ],
        )
    shards = _distinct(descriptions)
    properties = TensorProperties.from_json(sure[0].properties or {})
    metadata = ShardedTensorMetadata(shards, torch.Size(descriptions[0].size), properties)
    metadata.validate()
    return metadata


def _distinct(descriptions: Sequence[LocalDescription]) -> list[ShardMetadata]:
    """Return the shards of all ranks; a nested shard is listed by every rank that holds a part, and counts once."""
    shards: list[ShardMetadata] = []
    nested: set[Region] = set()
    for description in descriptions:
        for number, value in enumerate(description.shards):
            shard = ShardMetadata.from_json(value)
            if number not in description.nested:
                shards.append(shard)
            elif shard.region not in nested:
                nested.add(shard.region)
                shards.append(shard)
    return shards


def _check_same(what: str, values: Sequence[tuple[int, Any]]) -> None:
    first, value = values[0]
    for rank, other in values[1:]:
        if other != value:
            raise DisagreementError(f"ranks disagree about {what}: rank {first} has {value}, rank {rank} has {other}")
