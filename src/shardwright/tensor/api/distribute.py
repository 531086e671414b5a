"""Between plain tensors and DTensors: distributing, wrapping, unwrapping, redistributing, rebuilding."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from shardwright import comm
from shardwright.errors import ArgumentTypeError, TensorError
from shardwright.layout import Layout, Mesh
from shardwright.tensor.api.async_dtensor import start_moving
from shardwright.tensor.api.dtensor import DTensor
from shardwright.tensor.api.from_local import bound_mesh, for_gradient, verify_local
from shardwright.tensor.api.torch_hooks import introduce
from shardwright.tensor.base import trace
from shardwright.tensor.base.gradient_types import REPLICATE
from shardwright.tensor.base.tagging import alias, local_region, no_torch_function, nothing_of, tag
from shardwright.tensor.gradients.below_autograd import expect_plain_roots
from shardwright.tensor.redistribute.autograd import move
from shardwright.tensor.redistribute.cast import cast_before_sending, check_dtypes, move_as

__all__ = [
    "distribute_tensor",
    "rebuild",
    "redistribute",
    "to_local",
]


def distribute_tensor(
    tensor: Tensor,
    device_mesh: Any = None,
    placements: Sequence[object] | None = None,
    *,
    order: Sequence[int | str] | None = None,
    src_data_rank: int | None = 0,
) -> DTensor:
    """A whole tensor, spread over a mesh: every rank keeps its part.

    The values are those of the mesh's rank number `src_data_rank` (in the mesh's order), sent to the others.
    `src_data_rank=None` trusts each rank's own copy, and moves nothing. Without `placements`, it is replicated; without
    a mesh, it is spread over that of the enclosing `with mesh:`, or over all ranks. A DTensor that already has this
    layout is returned as it is.

    >>> import torch, shardwright as sw
    >>> mesh = sw.init_device_mesh("cpu", (1,), mesh_dim_names=("tp",))
    >>> print(sw.distribute_tensor(torch.ones(4, 6), mesh, [sw.Shard(1)]).sharding)
    [4, 6] (tp: S(1))
    """
    if isinstance(tensor, DTensor):
        if _layout(device_mesh, placements, tensor.shape, order) is tensor.sharding:
            return tensor
        raise TensorError(f"distribute_tensor: the tensor is a DTensor already, {tensor.sharding}: use redistribute")
    if not isinstance(tensor, Tensor):
        raise ArgumentTypeError(f"distribute_tensor: {type(tensor).__name__} is not a tensor")
    if not tensor.is_leaf:
        raise TensorError(
            "distribute_tensor: the tensor is the result of a computation, whose gradient this would lose; "
            "use DTensor.from_local, or detach it"
        )
    layout = _layout(device_mesh, placements, tensor.shape, order)
    _refuse_partial(layout, "distribute_tensor")
    with torch.no_grad():
        whole = tensor.detach()
        sent = src_data_rank is not None and not whole.is_meta and layout.mesh.size > 1
        if src_data_rank is not None and sent:
            whole = _from_source(whole, layout.mesh, src_data_rank)
        inside = comm.rank() in layout.mesh
        local = whole[local_region(layout).slices()] if inside else nothing_of(whole, layout)
        # Never the caller's own memory: what is written to one must not show in the other. Nor a piece of the whole's,
        # which would stay alive with it.
        if local.numel() < whole.numel() or _memory(local) == _memory(tensor):
            local = local.clone(memory_format=torch.contiguous_format)
    result: DTensor = tag(local.detach(), layout)
    result.requires_grad_(tensor.requires_grad)
    if isinstance(tensor, nn.Parameter):
        result = nn.Parameter(result, requires_grad=tensor.requires_grad)  # type: ignore[assignment]  # it stays a DTensor
    if sent:
        result._number = _sent[layout.mesh] = _sent.get(layout.mesh, 0) + 1
    return result


_sent: dict[Mesh, int] = {}  # how many tensors have been sent over a mesh
comm.on_forget(_sent.clear)


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
            f"{what}: {layout} is partial: a whole value is no sum of addends. Use DTensor.from_local for addends, "
            "or redistribute afterwards"
        )


def to_local(tensor: DTensor, grad_placements: Sequence[object] | None) -> Tensor:
    """See `DTensor.to_local`."""
    layout = tensor.sharding
    expect_plain_roots()
    with no_torch_function():
        if grad_placements is None:
            return tensor.view_as(tensor)
        target = for_gradient(layout, grad_placements)
        moved = move(tensor, layout, target)
        return tensor.view_as(tensor) if moved is tensor else moved


def redistribute(
    tensor: DTensor,
    device_mesh: Any,
    placements: Sequence[object] | None,
    order: Sequence[int | str] | None,
    async_op: bool,
    forward_dtype: torch.dtype | None = None,
    backward_dtype: torch.dtype | None = None,
) -> DTensor:
    """See `DTensor.redistribute`."""
    source = tensor.sharding
    check_dtypes(forward_dtype, backward_dtype)
    mesh = source.mesh if device_mesh is None else comm.bind(device_mesh)
    if placements is None:
        if mesh.ndim != source.mesh.ndim:
            raise TensorError(f"redistribute to {mesh!r}: give placements, one for each of its {mesh.ndim} dimensions")
        placements, order = source.placements, order or source.order
    target = Layout(mesh, placements, source.shape, order)
    before = tensor.dtype
    forward, backward = forward_dtype or before, backward_dtype or before
    if target is source and forward == before:
        return tensor
    differentiable = tensor.requires_grad and torch.is_grad_enabled()
    if async_op and target is not source and not differentiable and cast_before_sending(source, before, forward):
        cast: Any = tensor.to(forward)
        return start_moving(cast, source, target)
    with no_torch_function(), trace.asked(), comm.moving_tensor(tensor.__dict__.get("_number", 0)):
        if forward == backward == before:
            moved = move(tensor, source, target)
        else:
            moved = move_as(tensor, source, target, forward, backward)
        return tag(tensor.view_as(tensor) if moved is tensor else moved, target)  # type: ignore[no-any-return]  # likewise


def rebuild(local: Tensor, layout: dict[str, Any], saved_by: int, requires_grad: bool, is_parameter: bool) -> DTensor:
    """A DTensor from what pickle holds of it: its local tensor, its abstract layout, and whose part it is."""
    known = Layout.from_json(layout)
    rank = comm.rank()
    if rank not in known.mesh or known.mesh.size > comm.world().size:
        raise TensorError(
            f"a DTensor {known} was saved on {known.mesh!r}; this is rank {rank} of {comm.world().size}: load it on "
            "as many ranks, or save it with shardwright.checkpoint, which reshards"
        )
    if saved_by not in known.replicas(rank):
        raise TensorError(
            f"this part of a DTensor {known} was saved by rank {saved_by}, and is not that of rank {rank}: let every "
            "rank save and load its own, or use shardwright.checkpoint"
        )
    verify_local(local, known)
    result: DTensor = tag(alias(local.detach()).detach(), known)
    result.requires_grad_(requires_grad)
    if is_parameter:
        result._is_param = True  # what makes isinstance(x, nn.Parameter) true
    return result


introduce(DTensor, rebuild)
