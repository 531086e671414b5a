"""`init_from_local_shards`: every rank says what it holds, and all find out together what that makes."""

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
from shardwright.sharded.transfer.remote_shards import offer

__all__ = ["Said", "assemble", "init_from_local_shards"]


class Said(NamedTuple):
    """What one rank says of its part of a tensor; or, instead, what is wrong with it."""

    rank: int
    size: tuple[int, ...] = ()
    shards: tuple[dict[str, Any], ...] = ()
    properties: dict[str, Any] | None = None
    fault: str | None = None
    nested: tuple[int, ...] = ()  # which of the shards are sharded tensors themselves
    leaf: bool = True  # whether all of the shards are leaves of the graph
    either: bool = False  # whether they lie in memory both ways, contiguous and channels last


def init_from_local_shards(
    local_shards: Sequence[Shard], *global_size: Any, process_group: Any = None, init_rrefs: bool = False
) -> ShardedTensor:
    """A ShardedTensor of the shards that each rank has, some, one or none; they are not copied.

    All ranks of the group call it with the same global size. Whatever is wrong, on whichever rank, is raised alike on
    all of them: shards that overlap or leave a gap, a tensor that is not what its metadata says, ranks that disagree.
    Where any rank's shards have a history, the tensor is no leaf, on any rank.

    >>> import torch
    >>> from shardwright import sharded
    >>> mine = [sharded.Shard.from_tensor_and_offsets(torch.ones(2, 3), [row, 0]) for row in (0, 2)]
    >>> sharded.init_from_local_shards(mine, 4, 3).sharding_spec()
    ChunkShardingSpec(dim=0, placements=[RemoteDevice('rank:0/cpu'), RemoteDevice('rank:0/cpu')])
    """
    group = group_of(process_group)
    rank = group.global_rank
    own = msgspec.json.encode(_describe(local_shards, global_size, rank))
    heard = comm.gather_bytes(own, group, what="init_from_local_shards")
    said = [msgspec.json.decode(one, type=Said) for one in heard]
    metadata = assemble(said)
    made = ShardedTensor._bind(metadata, None, local_shards, group)
    made._leaf, made._nested = all(one.leaf for one in said), any(one.nested for one in said)
    metadata.table(owner_in(group))  # a placement may name no rank at all, or one that is not in the group
    if init_rrefs:
        made._remote = offer(made, group)
    return made


def _describe(shards: Sequence[Shard], global_size: Sequence[Any], rank: int) -> Said:
    try:
        size = global_size[0] if len(global_size) == 1 and isinstance(global_size[0], Sequence) else global_size
        checked = integers(size, "global size")
        check_kinds(shards)
        properties, either = common_properties(shards, rank)
        check_shards(shards, rank)
        nested = tuple(number for number, shard in enumerate(shards) if has_nested([shard]))
        return Said(
            rank,
            checked,
            tuple(shard.metadata.to_json() for shard in shards),
            None if properties is None else properties.to_json(),
            nested=nested,
            leaf=all(shard.tensor.is_leaf for shard in shards),
            either=either,
        )
    except Exception as error:  # noqa: BLE001  # whatever is wrong here is told to the ranks that wait, and raised on all
        text = str(error) if isinstance(error, ShardwrightError) else f"{type(error).__name__}: {error}"
        return Said(rank, fault=text if text.startswith(f"rank {rank}") else f"rank {rank}: {text}")


def assemble(said: Sequence[Said]) -> ShardedTensorMetadata:
    """The metadata that the ranks' words make together, or the error that all of them raise. Pure.

    >>> assemble([Said(0, (4,)), Said(1, (5,))])
    Traceback (most recent call last):
    shardwright.errors.DisagreementError: ranks disagree about the global size: rank 0 says (4,), rank 1 says (5,)
    """
    faults = [one.fault for one in said if one.fault is not None]
    if faults:
        raise ShardError(join_first(faults, 8, "; "))
    _same("the global size", [(one.rank, one.size) for one in said])
    holding = [one for one in said if one.properties is not None]
    if not holding:
        raise ShardError(f"no rank holds a shard of a tensor of size {said[0].size}: its dtype is unknown")
    sure = [one for one in holding if not one.either] or holding[:1]  # shards that lie both ways follow the others
    for name in ("dtype", "layout", "requires_grad", "memory_format", "pin_memory"):
        told = sure if name == "memory_format" else holding
        _same(name, [(one.rank, one.properties[name]) for one in told if one.properties is not None])
    shards = _once(said)
    properties = TensorProperties.from_json(sure[0].properties or {})
    metadata = ShardedTensorMetadata(shards, torch.Size(said[0].size), properties)
    metadata.validate()
    return metadata


def _once(said: Sequence[Said]) -> list[ShardMetadata]:
    """The shards that the ranks name; one that is sharded itself is named by all who hold a part, and counts once."""
    shards: list[ShardMetadata] = []
    cut_again: set[Region] = set()
    for one in said:
        for number, value in enumerate(one.shards):
            shard = ShardMetadata.from_json(value)
            if number not in one.nested:
                shards.append(shard)
            elif shard.region not in cut_again:
                cut_again.add(shard.region)
                shards.append(shard)
    return shards


def _same(what: str, said: Sequence[tuple[int, Any]]) -> None:
    first, value = said[0]
    for rank, other in said[1:]:
        if other != value:
            raise DisagreementError(f"ranks disagree about {what}: rank {first} says {value}, rank {rank} says {other}")
