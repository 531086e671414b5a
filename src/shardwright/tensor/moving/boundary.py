"""Between plain tensors and DTensors: distributing, wrapping, unwrapping, redistributing, rebuilding."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from shardwright import comm
from shardwright.errors import ArgumentTypeError, LocalTensorError, TensorError
from shardwright.layout import Layout, Mesh, Placement, Ragged, Shard, as_placement
from shardwright.tensor.dtensor import DTensor
from shardwright.tensor.local import alias, local_region, no_torch_function, tag
from shardwright.tensor.moving.introduce import introduce
from shardwright.tensor.moving.movement import move
from shardwright.tensor.moving.waiting import start_moving
from shardwright.tensor.seeing import trace
from shardwright.tensor.types import ENTERED, REPLICATE

__all__ = [
    "distribute_module",
    "distribute_tensor",
    "for_gradient",
    "from_local",
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
    `src_data_rank=None` trusts each rank's own copy, and moves nothing. Without `placements`, it is replicated.

    >>> import torch, shardwright as sw
    >>> mesh = sw.init_device_mesh("cpu", (1,), mesh_dim_names=("tp",))
    >>> print(sw.distribute_tensor(torch.ones(4, 6), mesh, [sw.Shard(1)]).sharding)
    [4, 6] (tp: S(1))
    """
    if isinstance(tensor, DTensor):
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
        if src_data_rank is not None and not whole.is_meta and layout.mesh.size > 1:
            whole = _from_source(whole, layout.mesh, src_data_rank)
        region = local_region(layout)
        local = whole[region.slices()]
        # Never the caller's own memory: what is written to one must not show in the other. Nor a piece of the whole's,
        # which would stay alive with it.
        if local.numel() < whole.numel() or _memory(local) == _memory(tensor):
            local = local.clone(memory_format=torch.contiguous_format)
    result: DTensor = tag(local.detach(), layout)
    result.requires_grad_(tensor.requires_grad)
    if isinstance(tensor, nn.Parameter):
        return nn.Parameter(result, requires_grad=tensor.requires_grad)  # type: ignore[return-value]  # it stays a DTensor
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
    mesh = default_mesh() if device_mesh is None else comm.bind(device_mesh)
    return Layout(mesh, [REPLICATE] * mesh.ndim if placements is None else placements, shape, order)


def default_mesh() -> Mesh:
    """The mesh of all ranks in one dimension, where none is given."""
    return Mesh((comm.world().size,), ranks=comm.world().ranks)


def _refuse_partial(layout: Layout, what: str) -> None:
    if layout.is_partial:
        raise TensorError(
            f"{what}: {layout} is partial: a whole value is no sum of addends. Use DTensor.from_local for addends, "
            "or redistribute afterwards"
        )


def from_local(
    local_tensor: Tensor,
    device_mesh: Any,
    placements: Sequence[object] | None,
    *,
    run_check: bool,
    shape: Sequence[int] | None,
    stride: Sequence[int] | None,
) -> DTensor:
    """See `DTensor.from_local`."""
    if isinstance(local_tensor, DTensor) or not isinstance(local_tensor, Tensor):
        raise ArgumentTypeError(f"from_local: {type(local_tensor).__name__} is not a plain tensor")
    mesh = default_mesh() if device_mesh is None else comm.bind(device_mesh)
    given: list[Placement] = [REPLICATE] * mesh.ndim if placements is None else [as_placement(p) for p in placements]
    if stride is not None and shape is None:
        raise TensorError("from_local: stride without shape says nothing: give both")
    if shape is not None:
        layout = Layout(mesh, given, shape)
        _verify(local_tensor, layout, run_check)
    else:
        layout = _infer(local_tensor, mesh, given, run_check)
    return tag(alias(local_tensor), layout)  # type: ignore[no-any-return]  # tag gives a DTensor


def _verify(local: Tensor, layout: Layout, on_all_ranks: bool) -> None:
    def check() -> None:
        expected = local_region(layout).size
        if tuple(local.shape) != expected and comm.rank() in layout.mesh:
            raise LocalTensorError(
                f"rank {comm.rank()}: a local tensor of shape {tuple(local.shape)} is not the part {expected} that "
                f"it holds of {layout}"
            )

    if not on_all_ranks or layout.mesh.size == 1:
        check()
        return
    group = comm.subgroup(sorted(layout.mesh.ranks))
    comm.agree(check, what="from_local", group=group)
    dtypes = [entry.decode() for entry in comm.gather_bytes(str(local.dtype).encode(), group=group)]
    if len(set(dtypes)) > 1:
        raise LocalTensorError(f"from_local: ranks {group.ranks} hold different dtypes: {', '.join(dtypes)}")


def _infer(local: Tensor, mesh: Mesh, placements: list[Placement], run_check: bool) -> Layout:
    """The layout of local tensors: equal shards, unless the ranks are asked."""
    shape = list(local.shape)
    for mesh_dim, placement in enumerate(placements):
        if isinstance(placement, Shard | Ragged):
            dim = placement.dim
            if not -len(shape) <= dim < len(shape):
                raise LocalTensorError(
                    f"from_local: {placement} on a local tensor of {len(shape)} dimensions: it is out of range"
                )
            shape[dim] = sum(placement.sizes) if isinstance(placement, Ragged) else shape[dim] * mesh.shape[mesh_dim]
    if run_check and mesh.size > 1:
        shape = _ask_shape(local, mesh, placements)
    layout = Layout(mesh, placements, shape)
    if run_check or any(isinstance(placement, Ragged) for placement in placements):
        _verify(local, layout, run_check)
    return layout


def _ask_shape(local: Tensor, mesh: Mesh, placements: list[Placement]) -> list[int]:
    """The global shape that the ranks' own local shapes add up to; whether they fit it is verified afterwards."""
    group = comm.subgroup(sorted(mesh.ranks))
    said = [json.loads(entry) for entry in comm.gather_bytes(json.dumps(list(local.shape)).encode(), group=group)]
    if len({len(shape) for shape in said}) > 1:
        raise LocalTensorError(f"from_local: ranks {group.ranks} hold local tensors of different dimensions: {said}")
    shapes = dict(zip(group.ranks, said, strict=True))
    shape = list(shapes[mesh.ranks[0]])
    for dim in range(len(shape)):
        cutting = [m for m, p in enumerate(placements) if isinstance(p, Shard | Ragged) and p.dim % len(shape) == dim]
        line = mesh.array[tuple(slice(None) if m in cutting else 0 for m in range(mesh.ndim))].reshape(-1).tolist()
        shape[dim] = sum(shapes[rank][dim] for rank in line) if cutting else shape[dim]
    return shape


def to_local(tensor: DTensor, grad_placements: Sequence[object] | None) -> Tensor:
    """See `DTensor.to_local`."""
    layout = tensor.sharding
    with no_torch_function():
        if grad_placements is None:
            return tensor.view_as(tensor)
        target = for_gradient(layout, grad_placements)
        moved = move(tensor, layout, target)
        return tensor.view_as(tensor) if moved is tensor else moved


def for_gradient(layout: Layout, grad_placements: Sequence[object]) -> Layout:
    """The layout whose gradient has these placements: a replicate with a partial gradient has entered."""
    given = [as_placement(placement) for placement in grad_placements]
    if len(given) != layout.mesh.ndim:
        raise TensorError(f"grad_placements {given} for {layout}: give one per mesh dimension")
    placements: list[Placement] = []
    for placement, gradient in zip(layout.placements, given, strict=True):
        if placement.is_replicate() and gradient.is_partial("sum"):
            placements.append(ENTERED)
        elif gradient == placement or (placement.is_partial() and gradient.is_replicate()):
            placements.append(placement)
        else:
            raise TensorError(
                f"grad_placements {given} for {layout}: the gradient of {placement} is "
                f"{'Replicate()' if placement.is_partial() else placement}"
                f"{' or Partial()' if placement.is_replicate() else ''}, not {gradient}"
            )
    return layout.replace(placements=placements, order=layout.order)


def redistribute(
    tensor: DTensor,
    device_mesh: Any,
    placements: Sequence[object] | None,
    order: Sequence[int | str] | None,
    async_op: bool,
) -> DTensor:
    """See `DTensor.redistribute`."""
    source = tensor.sharding
    mesh = source.mesh if device_mesh is None else comm.bind(device_mesh)
    if placements is None:
        if mesh.ndim != source.mesh.ndim:
            raise TensorError(f"redistribute to {mesh!r}: give placements, one for each of its {mesh.ndim} dimensions")
        placements, order = source.placements, order or source.order
    target = Layout(mesh, placements, source.shape, order)
    if target is source:
        return tensor
    if async_op and not (tensor.requires_grad and torch.is_grad_enabled()):
        return start_moving(tensor, source, target)
    with no_torch_function(), trace.asked():
        moved = move(tensor, source, target)
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
    _verify(local, known, on_all_ranks=False)
    result: DTensor = tag(alias(local.detach()).detach(), known)
    result.requires_grad_(requires_grad)
    if is_parameter:
        result._is_param = True  # what makes isinstance(x, nn.Parameter) true
    return result


def distribute_module(
    module: nn.Module,
    device_mesh: Any = None,
    partition_fn: Callable[[str, nn.Module, Any], None] | None = None,
    input_fn: Callable[[nn.Module, Any, Any], Any] | None = None,
    output_fn: Callable[[nn.Module, Any, Any], Any] | None = None,
) -> nn.Module:
    """The module with its parameters and buffers made DTensors, in place.

    `partition_fn(name, submodule, mesh)` distributes what it wants, submodule by submodule; what it leaves plain is
    replicated. `input_fn(module, inputs, mesh)` and `output_fn(module, outputs, mesh)` run before and after forward.

    >>> import torch, shardwright as sw
    >>> mesh = sw.init_device_mesh("cpu", (1,))
    >>> layer = sw.distribute_module(torch.nn.Linear(4, 2), mesh)
    >>> print(layer.weight.sharding)
    [2, 4] (0: R)
    """
    for name, submodule in module.named_modules():
        if partition_fn is not None:
            partition_fn(name, submodule, device_mesh)
        for key, parameter in submodule._parameters.items():
            if parameter is not None and not isinstance(parameter, DTensor):
                submodule.register_parameter(key, distribute_tensor(parameter, device_mesh))
        for key, buffer in submodule._buffers.items():
            if buffer is not None and not isinstance(buffer, DTensor):
                submodule._buffers[key] = distribute_tensor(buffer, device_mesh)
    if input_fn is not None:
        module.register_forward_pre_hook(lambda mod, inputs: input_fn(mod, inputs, device_mesh))
    if output_fn is not None:
        module.register_forward_hook(lambda mod, _, outputs: output_fn(mod, outputs, device_mesh))
    return module


introduce(DTensor, rebuild)
