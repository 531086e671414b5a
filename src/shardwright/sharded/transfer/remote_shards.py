"""Shards of other ranks, fetched over RPC: `RRef`s of what each rank offers.

A rank offers a tensor under a key of its own making, and tells the others the key and the name of its RPC worker.
Before any rank goes on, all have RRefs of all shards: an RRef holds its shard, whatever its owner does with the tensor.
"""

from __future__ import annotations

import uuid
from typing import Any, NamedTuple, final
from weakref import WeakValueDictionary

import msgspec

from shardwright import comm
from shardwright.errors import CommError, ShardError
from shardwright.sharded.base.tensor_base import ShardedTensorBase
from shardwright.sharded.metadata.shard import Shard
from shardwright.sharded.metadata.tensor_metadata import ShardMetadata

__all__ = ["RemoteShards", "offer"]

_offered: WeakValueDictionary[str, ShardedTensorBase] = WeakValueDictionary()


class _Offer(NamedTuple):
    """What a rank tells the others: its RPC worker, and the key of its tensor there."""

    worker: str | None
    key: str


@final
class RemoteShards:
    """The RRefs of the other ranks' shards, made again if the tensor has been resharded since."""

    def __init__(self, offers: dict[int, _Offer]) -> None:
        self._offers = offers
        self._shards: list[ShardMetadata] = []  # those that the references are of: a tensor can be resharded
        self._references: dict[int, list[Any]] = {}

    def references(self, tensor: ShardedTensorBase) -> dict[int, list[Any]]:
        """By global rank, in the order of the metadata; ranks without shards are left out."""
        if comm.worker_name() is None:
            raise CommError("remote_shards: RPC is not running here; call torch.distributed.rpc.init_rpc first")
        shards = tensor._metadata.shards_metadata
        if shards is not self._shards:
            found: dict[int, list[Any]] = {}
            for rank, shard in sorted(zip(tensor._table.ranks.tolist(), shards, strict=True), key=lambda pair: pair[0]):
                if rank in self._offers:
                    worker, key = self._offers[rank]
                    made = comm.call_remotely(str(worker), _shard_at, key, shard.shard_offsets, shard.shard_sizes)
                    found.setdefault(rank, []).append(made)
            self._references, self._shards = found, shards
        return {rank: list(references) for rank, references in self._references.items()}


def offer(tensor: ShardedTensorBase, group: comm.Group) -> RemoteShards:
    """Makes this rank's shards reachable for the others, and says how to reach theirs. All ranks of the group call it.

    Where RPC does not run on some of them, all get the same error.
    """
    own = _Offer(comm.worker_name(), uuid.uuid4().hex)
    said = comm.gather_bytes(msgspec.json.encode(own), group, what="init_rrefs")
    offers = [msgspec.json.decode(one, type=_Offer) for one in said]
    silent = [rank for rank, one in zip(group.ranks, offers, strict=True) if one.worker is None]
    if silent:
        raise CommError(
            f"init_rrefs: RPC is not running on ranks {silent}: call torch.distributed.rpc.init_rpc on every rank of "
            "the group before the tensor is made"
        )
    _offered[own.key] = tensor
    others = {rank: one for rank, one in zip(group.ranks, offers, strict=True) if rank != group.global_rank}
    comm.gather_bytes(b"", group, what="init_rrefs: offered")
    remote = RemoteShards(others)

    def refer() -> None:
        for references in remote.references(tensor).values():
            for reference in references:
                reference._get_future().wait()  # until its owner has looked up the shard

    comm.agree(refer, what="init_rrefs", group=group)
    return remote


def _shard_at(key: str, offsets: list[int], sizes: list[int]) -> Shard:
    """The shard that this rank offers under the key. Called by other ranks."""
    tensor = _offered.get(key)
    who = f"rank {comm.rank()}"
    if tensor is None:
        raise ShardError(f"{who} has freed the ShardedTensor whose shard at offsets {offsets} is asked for")
    for shard in tensor._local_shards:
        if shard.metadata.shard_offsets == offsets and shard.metadata.shard_sizes == sizes:
            return shard
    raise ShardError(
        f"{who} has no shard of sizes {sizes} at offsets {offsets}: the tensor is cut otherwise there. Ask for remote "
        "shards when all ranks have resharded it"
    )
