"""`distribute_tensor`: shard or replicate a plain tensor over a mesh."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from shardwright import comm
from shardwright.errors import ArgumentTypeError, TensorError
from shardwright.layout import Layout, Mesh
from shardwright.tensor.api.convert import rebuild
from shardwright.tensor.api.dtensor import DTensor
from shardwright.tensor.api.from_local import bound_mesh
from shardwright.tensor.api.torch_hooks import register_with_torch
from shardwright.tensor.base.gradient_types import REPLICATE
from shardwright.tensor.base.tagging import empty_outside_mesh, local_region, tag

__all__ = ["distribute_tensor"]


def distribute_tensor(
    tensor: Tensor,
    device_mesh: Any = None,
    placements: Sequence[object] | None = None,
    *,
    order: Sequence[int | str] | None = None,
    src_data_rank: int | None = 0,
) -> DTensor:
    """Return the global tensor as a DTensor, of which every rank keeps its shard.

    The values are those of rank number `src_data_rank` in the mesh's order, sent to the others. `src_data_rank=None`
    trusts each rank's own copy and sends nothing. The default is to replicate over the mesh of the enclosing
    `with mesh:`, or over all ranks. A DTensor that already has this layout is returned unchanged.

    >>> import torch, shardwright as sw
    >>> mesh = sw.init_device_mesh("cpu", (1,), mesh_dim_names=("tp",))
    >>> print(sw.distribute_tensor(torch.ones(4, 6), mesh, [sw.Shard(1)]).sharding)
    [4, 6] (tp: S(1))
    """
    if isinstance(tensor, DTensor):
        if _layout(device_mesh, placements, tensor.shape, order) is tensor.sharding:
            return tensor
        raise TensorError(f"distribute_tensor: the tensor is already a DTensor, {tensor.sharding}: use redistribute")
    if not isinstance(tensor, Tensor):
        raise ArgumentTypeError(f"distribute_tensor: expected a tensor, got {type(tensor).__name__}")
    if not tensor.is_leaf:
        raise TensorError(
            "distribute_tensor: the tensor is not a leaf, and its gradient would be lost: use DTensor.from_local, or "
            "detach it"
        )
    layout = _layout(device_mesh, placements, tensor.shape, order)
    _refuse_partial(layout, "distribute_tensor")
    with torch.no_grad():
        whole = tensor.detach()
        sent = src_data_rank is not None and not whole.is_meta and layout.mesh.size > 1
        if src_data_rank is not None and sent:
            whole = _from_source(whole, layout.mesh, src_data_rank)
        inside = comm.rank() in layout.mesh
        local = whole[local_region(layout).slices()] if inside else empty_outside_mesh(whole, layout)
        # Neither share the caller's memory, where a write would show in both, nor keep the global tensor alive.
        if local.numel() < whole.numel() or _memory(local) == _memory(tensor):
            local = local.clone(memory_format=torch.contiguous_format)
    result: DTensor = tag(local.detach(), layout)
    result.requires_grad_(tensor.requires_grad)
    if isinstance(tensor, nn.Parameter):
        result = nn.Parameter(result, requires_grad=tensor.requires_grad)  # type: ignore[assignment]  # it stays a DTensor
    if sent:
        # In the world's ledger, which outlives `comm.forget`: all ranks number tensors the same.
        result._number = comm.world().ledger.number_tensor(layout.mesh)
    return result


def _memory(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def _from_source(whole: Tensor, mesh: Mesh, source: int) -> Tensor:
    if not 0 <= source < mesh.size:
        raise TensorError(f"distribute_tensor: src_data_rank {source} is not in {mesh!r}, which has {mesh.size} ranks")
    if comm.rank() not in mesh:
        return whole
    group = comm.subgroup(sorted(mesh.ranks))
    return comm.broadcast(whole, group, src=group.ranks.index(mesh.ranks[source]))


def _layout(device_mesh: Any, placements: Any, shape: Sequence[int], order: Any) -> Layout:
    mesh = bound_mesh(device_mesh)
    return Layout(mesh, [REPLICATE] * mesh.ndim if placements is None else placements, shape, order)


def _refuse_partial(layout: Layout, what: str) -> None:
    if layout.is_partial:
        raise TensorError(
            f"{what}: {layout} is partial, but a global value is not a partial one: use DTensor.from_local for partial "
            "values, or redistribute afterwards"
        )


register_with_torch(DTensor, rebuild)
