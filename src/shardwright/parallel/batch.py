"""`shard_batch`: distribute a batch over the data dimensions of a mesh."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from shardwright import comm
from shardwright.errors import ArgumentTypeError, LocalTensorError, MeshMismatchError, TensorError
from shardwright.layout import Placement, Replicate, Shard
from shardwright.listing import join_first
from shardwright.parallel.plan.mesh_roles import MeshRoles, mesh_roles
from shardwright.tensor import DTensor, distribute_tensor

__all__ = ["shard_batch"]


def shard_batch(
    batch: Any, mesh: Any, *, dim: int = 0, sequence_dim: int | None = 1, per_rank: bool = False, check: bool = True
) -> Any:
    """Return the batch with its tensors as DTensors, sharded along `dim` over the mesh dimensions `dp` and `replicate`.

    A batch is a tensor, or a mapping, list or tuple of batches; other values and 0-dimensional tensors are the same for
    all ranks. The number of samples does not have to divide by the number of ranks: a rank may get fewer, or none, and
    the loss is still the mean over the global batch. Over `tp` the batch is replicated. Over `cp`, tensors that have a
    dimension `sequence_dim` are sharded along it; pass `None` to replicate all of them.

    By default every rank passes the same global batch and keeps its shard. With `per_rank=True` every rank passes its
    own samples, as a `DataLoader` with a `DistributedSampler` yields them, and the global batch is all of them in rank
    order; their numbers may differ, but not their other sizes (pad sequences to one length), and ranks that differ only
    along `tp` or `cp` must pass the same samples, with whole sequences. Give the sampler the number of data ranks and
    this rank's index among them:

        mesh["dp"].size()  and  mesh.get_local_rank("dp")

    Raise `LocalTensorError` on all ranks if values differ that must be the same; `check=False` leaves that out, and one
    small message with it. A DTensor is accepted if it is on this mesh.

    >>> import torch, shardwright as sw
    >>> mesh = sw.init_device_mesh("cpu", (1,), mesh_dim_names=("dp",))
    >>> batch = sw.shard_batch({"input_ids": torch.zeros(5, 8, dtype=torch.long), "scale": 2.0}, mesh)
    >>> print(batch["input_ids"].sharding, batch["scale"])
    [5, 8] (dp: S(0)) 2.0
    """
    roles = mesh_roles(mesh, "shard_batch")
    if check and not per_rank and roles.mesh.size > 1:
        _check_same(batch, roles)

    def distribute(tensor: Tensor) -> Tensor:
        if isinstance(tensor, DTensor):
            if tensor.sharding.mesh is not roles.mesh:
                raise MeshMismatchError(
                    f"shard_batch: a tensor of the batch is on {tensor.sharding.mesh!r}, not on {roles.mesh!r}: "
                    "redistribute it to this mesh, or pass plain tensors"
                )
            return tensor
        if tensor.requires_grad:
            raise TensorError("shard_batch: a tensor of the batch requires grad: detach it, or use DTensor.from_local")
        if not tensor.ndim:
            return distribute_tensor(tensor, mesh, [Replicate()] * roles.mesh.ndim, src_data_rank=None)
        placements = _placements(roles, dim)
        over = roles.context if sequence_dim is not None and sequence_dim < tensor.ndim else None
        if per_rank:
            own = DTensor.from_local(tensor, mesh, placements, run_check=check or None)
            return own if over is None else own.redistribute(placements=along(own.sharding.placements, over))
        return distribute_tensor(tensor, mesh, along(placements, over), src_data_rank=None)

    def along(placements: Sequence[Placement], over: int | None) -> list[Placement]:
        """Return the placements with the sequence sharded over a mesh dimension, if one is given."""
        return [Shard(sequence_dim or 0) if index == over else each for index, each in enumerate(placements)]

    return _map(batch, distribute)


def _placements(roles: MeshRoles, dim: int) -> list[Placement]:
    return [Shard(dim) if index in roles.samples else Replicate() for index in range(roles.mesh.ndim)]


def _map(value: Any, change: Callable[[Tensor], Any]) -> Any:
    """Return the nested batch with every tensor replaced; a mapping becomes a dict."""
    if isinstance(value, Tensor):
        return change(value)
    if isinstance(value, Mapping):
        return {key: _map(item, change) for key, item in value.items()}
    if isinstance(value, list):
        return [_map(item, change) for item in value]
    if isinstance(value, tuple):
        items = [_map(item, change) for item in value]
        return type(value)(*items) if hasattr(value, "_fields") else tuple(items)
    if isinstance(value, set | frozenset):
        raise ArgumentTypeError("shard_batch: a set has no order that ranks share: pass a list or a tuple")
    return value


def _check_same(batch: Any, roles: MeshRoles) -> None:
    """Raise on all ranks of the mesh if they do not pass the same global batch."""
    if comm.rank() not in roles.mesh:
        return
    digest = hashlib.blake2b(digest_size=16)
    described: list[str] = []

    def add(tensor: Tensor) -> None:
        described.append(f"{list(tensor.shape)} {tensor.dtype}")
        if not isinstance(tensor, DTensor):
            plain = tensor.detach().cpu().resolve_conj().resolve_neg().contiguous().reshape(-1)
            digest.update(plain.view(torch.uint8).numpy().data)

    _map(batch, add)
    own = f"{', '.join(described)}; {digest.hexdigest()}".encode()
    group = comm.subgroup(sorted(roles.mesh.ranks))
    first, *others = comm.gather_bytes(own, group, what="shard_batch")
    different = [rank for rank, other in zip(group.ranks[1:], others, strict=True) if other != first]
    if different:
        raise LocalTensorError(
            f"shard_batch: rank {group.ranks[0]} and rank {join_first(different, 8)} pass different batches, but every "
            "rank must pass the same global batch. If each rank loads its own samples, pass per_rank=True"
        )
