"""Convert between ShardedTensors and DTensors: sharing memory if their regions agree, else by a transfer.

Whether they agree follows from the two tables of regions alone, so all ranks decide identically without communication.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from shardwright import comm
from shardwright.errors import ArgumentTypeError, MeshError, PlacementError
from shardwright.layout import Layout, Mesh, Placement, Ragged, Region, RegionTable, Replicate, Shard
from shardwright.sharded.base.checks import refuse_nested, refuse_sparse
from shardwright.sharded.metadata.digest import digest
from shardwright.sharded.metadata.owners import owner_in
from shardwright.sharded.metadata.process_group import group_of
from shardwright.sharded.metadata.properties import TensorProperties
from shardwright.sharded.metadata.shard import Shard as LocalShard
from shardwright.sharded.metadata.spec import LayoutShardingSpec, ShardingSpec, metadata_for
from shardwright.sharded.metadata.tensor_metadata import ShardedTensorMetadata
from shardwright.sharded.tensor import ShardedTensor
from shardwright.sharded.transfer.transfer import ShardTransfer
from shardwright.sharded.transfer.transfer_plan import holds
from shardwright.tensor import DTensor
from shardwright.tensor.base.tagging import alias, local_region, tag

__all__ = ["from_dtensor", "to_dtensor"]


def to_dtensor(
    tensor: ShardedTensor | ShardedTensorMetadata,
    mesh: Any = None,
    placements: Sequence[object] | None = None,
    order: Sequence[int | str] | None = None,
) -> DTensor:
    """Convert a ShardedTensor to a DTensor on a mesh. Differentiable.

    If every rank of the mesh holds exactly its region, as one shard, the DTensor shares memory with the shard, without
    communication. Otherwise each rank receives only what it lacks; all ranks of the tensor's group and of the mesh call
    it, and a rank outside the group, which has no ShardedTensor, passes the tensor's `metadata()`. Outside the mesh the
    local tensor is empty.

    The mesh defaults to all ranks of the group in one dimension, the placements to those that match the shards.

    >>> from shardwright import sharded
    >>> table = sharded.ones(sharded.ChunkShardingSpec(0, ["rank:0/cpu"]), 4, 2)
    >>> x = sharded.to_dtensor(table)
    >>> print(x.sharding, x.to_local().data_ptr() == table.local_tensor().data_ptr())
    [4, 2] (0: S(0)) True
    """
    shards: Sequence[LocalShard] = ()
    group: comm.Group | None = None
    if isinstance(tensor, ShardedTensorMetadata):
        metadata, table = tensor, tensor.table(owner_in(comm.world()))
    elif isinstance(tensor, ShardedTensor):
        metadata, table = tensor.metadata(), tensor._table
        shards, group = tensor.local_shards(), tensor._group
    else:
        raise ArgumentTypeError(f"to_dtensor: expected a ShardedTensor or its metadata, got {type(tensor).__name__}")
    if isinstance(tensor, ShardedTensor):
        refuse_nested(tensor, "to_dtensor")
        refuse_sparse(tensor, "to_dtensor")
    layout = _layout_for(tensor, table, mesh, placements, order)
    needs = metadata.tensor_properties.requires_grad and torch.is_grad_enabled()
    like = torch.empty(0, dtype=metadata.tensor_properties.dtype, device=_device(shards, metadata))
    if holds(table, layout.table()):
        local = alias(_part(shards, local_region(layout), like, needs))
    else:
        local = _moved_to(layout, table, group, [shard.tensor for shard in shards], like, needs)
    return tag(local, layout)  # type: ignore[no-any-return]  # tag gives a DTensor


def _layout_for(
    tensor: ShardedTensor | ShardedTensorMetadata, table: RegionTable, mesh: Any, placements: Any, order: Any
) -> Layout:
    target_mesh = None if mesh is None else comm.bind(mesh)
    if isinstance(tensor, ShardedTensor):
        size, ranks, spec = tensor.shape, tensor._group.ranks, tensor._spec
        if placements is None and isinstance(spec, LayoutShardingSpec) and target_mesh in (None, spec.mesh):
            target_mesh, placements, order = spec.mesh, spec.placements, spec.order
    else:
        size, ranks = tensor.size, comm.world().ranks
    if target_mesh is None:
        target_mesh = Mesh((len(ranks),), ranks=ranks)
    if unknown := sorted(set(target_mesh.ranks) - set(comm.world().ranks)):
        raise MeshError(
            f"to_dtensor: ranks {unknown} of {target_mesh!r} are not in the world of {comm.world().size} ranks"
        )
    layout = Layout(target_mesh, _agreeing(table, target_mesh, size) if placements is None else placements, size, order)
    if layout.is_partial:
        raise PlacementError(
            f"to_dtensor: {layout} is partial, but shards hold complete values: use Shard or Replicate"
        )
    return layout


def _agreeing(table: RegionTable, mesh: Mesh, size: Sequence[int]) -> tuple[Placement]:
    """Return the placement on a one-dimensional mesh whose regions are these shards."""
    candidates: list[Placement] = []
    if mesh.ndim == 1:
        for dim in range(len(size)):
            candidates.append(Shard(dim))
            lengths = dict(zip(table.ranks.tolist(), table.sizes[:, dim].tolist(), strict=True))
            for rank, *sizes in np.column_stack([table.ranks, table.sizes]).tolist():
                if 0 not in sizes:
                    lengths[rank] = sizes[dim]
            lengths_by_rank = [lengths.get(rank, 0) for rank in mesh.ranks]
            candidates += [Ragged(dim, lengths_by_rank)] if sum(lengths_by_rank) == size[dim] else []
        candidates += [Replicate()] if mesh.size == 1 else []
    for placement in candidates:
        if holds(table, Layout(mesh, [placement], size).table()):
            return (placement,)
    raise PlacementError(
        f"to_dtensor: no placement on {mesh!r} matches the {len(table.ranks)} shards of a tensor of size {list(size)}: "
        "pass placements, and missing regions are transferred"
    )


def _moved_to(
    layout: Layout, table: RegionTable, group: comm.Group | None, local_tensors: list[Tensor], like: Tensor, needs: bool
) -> Tensor:
    """Return this rank's region under the layout, received from the ranks that hold it."""
    members = set(table.ranks.tolist()) | set(layout.mesh.ranks)
    if group is None or not members <= set(group.ranks):
        if comm.rank() not in members:
            return like.new_empty(local_region(layout).size)
        group = comm.subgroup(sorted(members))
    target = _with_empty_rows(layout.table(), sorted(members - set(layout.mesh.ranks)))
    _agree("to_dtensor", table, target, like, needs, group)
    transfer = ShardTransfer(table, target, group)
    # One region per rank. Replicas have identical gradients, so one suffices in backward: a rank's own, if it has one.
    moved = transfer.apply(local_tensors, like) if needs else transfer.run(local_tensors, like)
    return moved[0] if moved else like.new_empty(local_region(layout).size)


def _agree(what: str, source: RegionTable, target: RegionTable, like: Tensor, needs: bool, group: comm.Group) -> None:
    """Check that all ranks are about to perform the same transfer."""
    gradients = "with gradients" if needs else "without gradients"
    comm.agree(
        lambda: (None, f"{digest(source)} of {like.dtype} to {digest(target)} {gradients}"),
        what=what,
        group=group,
        same=True,
        unwrap=True,
    )


def _with_empty_rows(table: RegionTable, ranks: list[int]) -> RegionTable:
    """Add an empty box for each of these ranks to the table, so that they take part."""
    nothing = np.zeros((len(ranks), table.sizes.shape[1]), np.int64)
    return RegionTable(
        np.concatenate([table.ranks, np.array(ranks, np.int64)]),
        np.concatenate([table.offsets, nothing]),
        np.concatenate([table.sizes, nothing]),
    )


def _part(shards: Sequence[LocalShard], region: Region, like: Tensor, needs: bool) -> Tensor:
    """Return the shard of this region; for an empty region, any shard of its size, or a new tensor."""
    for shard in shards:
        if shard.metadata.region == region or (region.is_empty and tuple(shard.metadata.shard_sizes) == region.size):
            return shard.tensor
    return like.new_empty(region.size).requires_grad_(needs)


def _device(shards: Sequence[LocalShard], metadata: ShardedTensorMetadata) -> torch.device:
    if shards:
        return shards[0].tensor.device
    placements = [shard.placement for shard in metadata.shards_metadata if shard.placement is not None]
    return torch.device(placements[0].device().type) if placements else torch.device("cpu")


def from_dtensor(x: DTensor, sharding_spec: ShardingSpec | None = None, process_group: Any = None) -> ShardedTensor:
    """Convert a DTensor to a ShardedTensor. Without a spec it shares memory. Differentiable.

    Its regions become the shards; the first rank of the mesh that holds a region owns it, and replicas are left out.
    With a spec, each rank receives what it lacks of its shards. A `Partial` is first reduce-scattered along the longest
    dimension. Collective over the ranks of the mesh and of the spec, which form the group unless another is given. A
    non-contiguous local tensor is copied.

    >>> import torch, shardwright as sw
    >>> x = sw.distribute_tensor(torch.ones(4, 2), sw.init_device_mesh("cpu", (1,)), [sw.Shard(0)])
    >>> table = sw.sharded.from_dtensor(x)
    >>> table.shards_metadata()
    [ShardMetadata(shard_offsets=[0, 0], shard_sizes=[4, 2], placement=rank:0/cpu)]
    >>> len(sw.sharded.from_dtensor(x, sw.sharded.ChunkShardingSpec(1, ["rank:0/cpu"] * 2)).local_shards())
    2
    """
    if not isinstance(x, DTensor):
        raise ArgumentTypeError(f"from_dtensor: expected a shardwright DTensor, got {type(x).__name__}")
    x = _reduced(x)
    layout, local = x.sharding, x.to_local()
    needs = x.requires_grad and torch.is_grad_enabled()
    spec = sharding_spec
    if spec is None:
        device = torch.device(local.device.type)
        spec = LayoutShardingSpec(layout.mesh, layout.placements, layout.order, device)
    metadata = metadata_for(spec, layout.shape, TensorProperties(x.dtype, requires_grad=needs))
    result = ShardedTensor._bind(metadata, spec, (), _group_for(layout, metadata, process_group))
    result._leaf = not needs
    source, table = layout.table(), result._table
    like, shards = local.detach(), result._local_metadata()
    if holds(source, table) and (not needs or holds(table, source)):
        dense = local.contiguous()
        pieces = [
            like.new_empty(shard.shard_sizes).requires_grad_(needs) if shard.region.is_empty else dense
            for shard in shards
        ]
    else:
        if sharding_spec is not None:
            _agree("from_dtensor", source, table, like, needs, result._group)
        local_tensors = [local] if comm.rank() in layout.mesh else []
        transfer = ShardTransfer(source, table, result._group)
        pieces = transfer.apply(local_tensors, like) if needs else transfer.run(local_tensors, like)
        pieces = [
            piece if shard.placement is None else piece.to(shard.placement.device())
            for piece, shard in zip(pieces, shards, strict=True)
        ]
    result._local_shards = [LocalShard(piece, shard) for piece, shard in zip(pieces, shards, strict=True)]
    return result


def _reduced(x: DTensor) -> DTensor:
    """Return the DTensor with partial values reduced, each rank keeping a shard of the result."""
    layout = x.sharding
    if not layout.is_partial:
        return x
    longest = max(range(layout.ndim), key=lambda dim: layout.shape[dim], default=None)
    reduced: Placement = Replicate() if longest is None else Shard(longest)
    # Existing shardings apply first: sizes of Ragged refer to the full dimension.
    partial = [mesh_dim for mesh_dim in layout.order if layout.placements[mesh_dim].is_partial()]
    order = [mesh_dim for mesh_dim in layout.order if mesh_dim not in partial] + partial
    placements = [reduced if placement.is_partial() else placement for placement in layout.placements]
    return x.redistribute(placements=placements, order=order)


def _group_for(layout: Layout, metadata: ShardedTensorMetadata, process_group: Any) -> comm.Group:
    ranks = set(layout.mesh.ranks)
    if process_group is not None:
        group = group_of(process_group)
        if missing := sorted(ranks - set(group.ranks)):
            raise PlacementError(
                f"from_dtensor: ranks {missing} hold parts of {layout} but are not in the group of ranks "
                f"{list(group.ranks)}: pass a group with all ranks of the mesh"
            )
        return group
    owner = owner_in(comm.world())
    ranks |= {owner(placement) for placement in {shard.placement for shard in metadata.shards_metadata}}
    if comm.rank() not in ranks:
        raise PlacementError(
            f"from_dtensor: rank {comm.rank()} is not in {layout.mesh!r} and gets no shard: pass a process_group that "
            "includes it on all ranks, or do not call it here"
        )
    return comm.subgroup(sorted(ranks))
