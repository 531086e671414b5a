"""Remote access to the shards of other ranks over RPC, by `RRef`s.

Each rank registers its tensor under a unique key and sends the key and its RPC worker name to the others. All ranks
create RRefs of all shards before any continues: an RRef keeps its shard alive, whatever its owner does with the tensor.
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

__all__ = ["RemoteShards", "share_shards"]

_registered: WeakValueDictionary[str, ShardedTensorBase] = WeakValueDictionary()


class _Registration(NamedTuple):
    """The message of a rank to the others: its RPC worker, and the key of its tensor there."""

    worker: str | None
    key: str


@final
class RemoteShards:
    """RRefs of the other ranks' shards; created again after the tensor was resharded."""

    def __init__(self, registrations: dict[int, _Registration]) -> None:
        self._registrations = registrations
        self._shards: list[ShardMetadata] = []  # the shards that the references belong to
        self._references: dict[int, list[Any]] = {}

    def references(self, tensor: ShardedTensorBase) -> dict[int, list[Any]]:
        """Return RRefs by global rank, in the order of the metadata; ranks without shards are left out."""
        if comm.worker_name() is None:
            raise CommError("remote_shards: RPC is not running here; call torch.distributed.rpc.init_rpc first")
        shards = tensor._metadata.shards_metadata
        if shards is not self._shards:
            by_rank: dict[int, list[Any]] = {}
            for rank, shard in sorted(zip(tensor._table.ranks.tolist(), shards, strict=True), key=lambda pair: pair[0]):
                if rank in self._registrations:
                    worker, key = self._registrations[rank]
                    reference = comm.call_remotely(str(worker), _shard_at, key, shard.shard_offsets, shard.shard_sizes)
                    by_rank.setdefault(rank, []).append(reference)
            self._references, self._shards = by_rank, shards
        return {rank: list(references) for rank, references in self._references.items()}


def share_shards(tensor: ShardedTensorBase, group: comm.Group) -> RemoteShards:
    """Make this rank's shards accessible to the others and return access to theirs. Collective.

    If RPC is not running on some ranks, all raise the same error.
    """
    registration = _Registration(comm.worker_name(), uuid.uuid4().hex)
    gathered = comm.gather_bytes(msgspec.json.encode(registration), group, what="init_rrefs")
    registrations = [msgspec.json.decode(message, type=_Registration) for message in gathered]
    missing = [rank for rank, peer in zip(group.ranks, registrations, strict=True) if peer.worker is None]
    if missing:
        raise CommError(
            f"init_rrefs: RPC is not running on ranks {missing}: call torch.distributed.rpc.init_rpc on every rank of "
            "the group before creating the tensor"
        )
    _registered[registration.key] = tensor
    own_rank = group.global_rank
    others = {rank: peer for rank, peer in zip(group.ranks, registrations, strict=True) if rank != own_rank}
    comm.gather_bytes(b"", group, what="init_rrefs: registered")
    remote = RemoteShards(others)

    def refer() -> None:
        for references in remote.references(tensor).values():
            for reference in references:
                reference._get_future().wait()  # wait until the owner has looked up the shard

    comm.agree(refer, what="init_rrefs", group=group)
    return remote


def _shard_at(key: str, offsets: list[int], sizes: list[int]) -> Shard:
    """Return the shard that this rank registered under the key. Called by other ranks."""
    tensor = _registered.get(key)
    this_rank = f"rank {comm.rank()}"
    if tensor is None:
        raise ShardError(f"{this_rank} has freed the ShardedTensor whose shard at offsets {offsets} was requested")
    for shard in tensor._local_shards:
        if shard.metadata.shard_offsets == offsets and shard.metadata.shard_sizes == sizes:
            return shard
    raise ShardError(
        f"{this_rank} has no shard of sizes {sizes} at offsets {offsets}: the tensor is sharded differently there. "
        "Request remote shards after all ranks have resharded it"
    )
