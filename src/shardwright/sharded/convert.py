"""Between ShardedTensors and DTensors: the same memory where their regions agree, else the moves that are due.

Whether they agree is found from the two tables of regions alone, so all ranks decide alike and none waits for another.
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
from shardwright.sharded.base.agreement import digest
from shardwright.sharded.base.checks import refuse_nested, refuse_sparse
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
    """The ShardedTensor as a DTensor on a mesh; gradients flow back to its shards.

    Where every rank of the mesh holds just its region, as one shard, the DTensor is that shard's memory, and nobody
    talks. Else each rank receives what it lacks and nothing more, and all ranks of the tensor's group call it, as do
    those of the mesh: a rank outside the group, which has no ShardedTensor, gives the tensor's `metadata()`. A rank
    outside the mesh gets a DTensor that is empty there.

    Without a mesh it is all ranks of the group in a row; without placements, those that the shards agree with.

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
        raise ArgumentTypeError(f"to_dtensor: {type(tensor).__name__} is not a ShardedTensor, nor the metadata of one")
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
    known = None if mesh is None else comm.bind(mesh)
    if isinstance(tensor, ShardedTensor):
        size, ranks, spec = tensor.shape, tensor._group.ranks, tensor._spec
        if placements is None and isinstance(spec, LayoutShardingSpec) and known in (None, spec.mesh):
            known, placements, order = spec.mesh, spec.placements, spec.order
    else:
        size, ranks = tensor.size, comm.world().ranks
    if known is None:
        known = Mesh((len(ranks),), ranks=ranks)
    if strangers := sorted(set(known.ranks) - set(comm.world().ranks)):
        raise MeshError(f"to_dtensor: ranks {strangers} of {known!r} are not in the world of {comm.world().size} ranks")
    layout = Layout(known, _agreeing(table, known, size) if placements is None else placements, size, order)
    if layout.is_partial:
        raise PlacementError(f"to_dtensor: {layout} holds addends, and shards hold values: use Shard or Replicate")
    return layout


def _agreeing(table: RegionTable, mesh: Mesh, size: Sequence[int]) -> tuple[Placement]:
    """The placement on a mesh of one dimension whose regions are the shards as they lie."""
    candidates: list[Placement] = []
    if mesh.ndim == 1:
        for dim in range(len(size)):
            candidates.append(Shard(dim))
            lengths = dict(zip(table.ranks.tolist(), table.sizes[:, dim].tolist(), strict=True))
            for rank, *sizes in np.column_stack([table.ranks, table.sizes]).tolist():
                if 0 not in sizes:
                    lengths[rank] = sizes[dim]
            given = [lengths.get(rank, 0) for rank in mesh.ranks]
            candidates += [Ragged(dim, given)] if sum(given) == size[dim] else []
        candidates += [Replicate()] if mesh.size == 1 else []
    for placement in candidates:
        if holds(table, Layout(mesh, [placement], size).table()):
            return (placement,)
    raise PlacementError(
        f"to_dtensor: the {len(table.ranks)} shards of a tensor of size {list(size)} are no placement's on {mesh!r}: "
        "give placements, and what does not lie there already is moved"
    )


def _moved_to(
    layout: Layout, table: RegionTable, group: comm.Group | None, held: list[Tensor], like: Tensor, needs: bool
) -> Tensor:
    """This rank's region under the layout, received from the ranks that hold its parts."""
    members = set(table.ranks.tolist()) | set(layout.mesh.ranks)
    if group is None or not members <= set(group.ranks):
        if comm.rank() not in members:
            return like.new_empty(local_region(layout).size)
        group = comm.subgroup(sorted(members))
    target = _with_empty_rows(layout.table(), sorted(members - set(layout.mesh.ranks)))
    _agree("to_dtensor", table, target, like, needs, group)
    transfer = ShardTransfer(table, target, group)
    # One region for each rank. Replicas have gradients that are alike, so on the way back one of them is enough: a
    # rank's own, where it has one.
    moved = transfer.apply(held, like) if needs else transfer.run(held, like)
    return moved[0] if moved else like.new_empty(local_region(layout).size)


def _agree(what: str, source: RegionTable, target: RegionTable, like: Tensor, needs: bool, group: comm.Group) -> None:
    """Sees that all ranks are about to make the same moves, before any waits for another."""
    how = "with gradients" if needs else "without gradients"
    comm.agree(
        lambda: (None, f"{digest(source)} of {like.dtype} to {digest(target)} {how}"),
        what=what,
        group=group,
        same=True,
        unwrap=True,
    )


def _with_empty_rows(table: RegionTable, ranks: list[int]) -> RegionTable:
    """The table with an empty box for each of these ranks, so that they take part."""
    nothing = np.zeros((len(ranks), table.sizes.shape[1]), np.int64)
    return RegionTable(
        np.concatenate([table.ranks, np.array(ranks, np.int64)]),
        np.concatenate([table.offsets, nothing]),
        np.concatenate([table.sizes, nothing]),
    )


def _part(shards: Sequence[LocalShard], region: Region, like: Tensor, needs: bool) -> Tensor:
    """The shard that is this region; where the region is empty, any shard of its size, or a new tensor."""
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
    """The DTensor as a ShardedTensor: the same memory, without a spec; gradients flow back to the DTensor.

    Its regions become the shards; the first rank of the mesh that holds a region owns it, and replicas are left out.
    With a spec its shards are made, and each rank receives what it does not hold itself, as a replica or otherwise. A
    `Partial` is reduced first, into shards of the longest dimension. All ranks of the mesh call it, and those that the
    spec names; they are the group, unless another is given. A local tensor that is not contiguous is copied.

    >>> import torch, shardwright as sw
    >>> x = sw.distribute_tensor(torch.ones(4, 2), sw.init_device_mesh("cpu", (1,)), [sw.Shard(0)])
    >>> table = sw.sharded.from_dtensor(x)
    >>> table.shards_metadata()
    [ShardMetadata(shard_offsets=[0, 0], shard_sizes=[4, 2], placement=rank:0/cpu)]
    >>> len(sw.sharded.from_dtensor(x, sw.sharded.ChunkShardingSpec(1, ["rank:0/cpu"] * 2)).local_shards())
    2
    """
    if not isinstance(x, DTensor):
        raise ArgumentTypeError(f"from_dtensor: {type(x).__name__} is not a shardwright DTensor")
    x = _reduced(x)
    layout, local = x.sharding, x.to_local()
    needs = x.requires_grad and torch.is_grad_enabled()
    spec = sharding_spec
    if spec is None:
        device = torch.device(local.device.type)
        spec = LayoutShardingSpec(layout.mesh, layout.placements, layout.order, device)
    metadata = metadata_for(spec, layout.shape, TensorProperties(x.dtype, requires_grad=needs))
    made = ShardedTensor._bind(metadata, spec, (), _group_for(layout, metadata, process_group))
    made._leaf = not needs
    source, table = layout.table(), made._table
    like, own = local.detach(), made._own()
    if holds(source, table) and (not needs or holds(table, source)):
        dense = local.contiguous()
        pieces = [
            like.new_empty(shard.shard_sizes).requires_grad_(needs) if shard.region.is_empty else dense for shard in own
        ]
    else:
        if sharding_spec is not None:
            _agree("from_dtensor", source, table, like, needs, made._group)
        held = [local] if comm.rank() in layout.mesh else []
        transfer = ShardTransfer(source, table, made._group)
        pieces = transfer.apply(held, like) if needs else transfer.run(held, like)
        pieces = [
            piece if shard.placement is None else piece.to(shard.placement.device())
            for piece, shard in zip(pieces, own, strict=True)
        ]
    made._local_shards = [LocalShard(piece, shard) for piece, shard in zip(pieces, own, strict=True)]
    return made


def _reduced(x: DTensor) -> DTensor:
    """The DTensor with its addends added up, each rank left with a shard of the sum."""
    layout = x.sharding
    if not layout.is_partial:
        return x
    longest = max(range(layout.ndim), key=lambda dim: layout.shape[dim], default=None)
    whole: Placement = Replicate() if longest is None else Shard(longest)
    # What cuts already goes on cutting first: Ragged sizes are of the whole dimension.
    addends = [mesh_dim for mesh_dim in layout.order if layout.placements[mesh_dim].is_partial()]
    order = [mesh_dim for mesh_dim in layout.order if mesh_dim not in addends] + addends
    placements = [whole if placement.is_partial() else placement for placement in layout.placements]
    return x.redistribute(placements=placements, order=order)


def _group_for(layout: Layout, metadata: ShardedTensorMetadata, process_group: Any) -> comm.Group:
    ranks = set(layout.mesh.ranks)
    if process_group is not None:
        group = group_of(process_group)
        if strangers := sorted(ranks - set(group.ranks)):
            raise PlacementError(
                f"from_dtensor: ranks {strangers} hold parts of {layout} and are not in the group of ranks "
                f"{list(group.ranks)}: give a group with all ranks of the mesh"
            )
        return group
    owner = owner_in(comm.world())
    ranks |= {owner(placement) for placement in {shard.placement for shard in metadata.shards_metadata}}
    if comm.rank() not in ranks:
        raise PlacementError(
            f"from_dtensor: rank {comm.rank()} is not in {layout.mesh!r}, and gets no shard: give a process_group with "
            "this rank, on all of its ranks, or do not call it here"
        )
    return comm.subgroup(sorted(ranks))
