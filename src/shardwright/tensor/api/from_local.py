"""`DTensor.from_local`: make one DTensor of the local tensors of all ranks, and check that they fit together.

Without a global shape, it follows from the local sizes along sharded dimensions, which are gathered in one small
message over the control channel of the sharding mesh dimensions. That message also carries dtype and `requires_grad`,
which must be the same on every rank.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor

from shardwright import comm
from shardwright.errors import ArgumentTypeError, LocalTensorError, PlacementError, TensorError
from shardwright.layout import Layout, Mesh, Placement, Ragged, Shard, as_placement
from shardwright.layout.placement import StridedShard
from shardwright.tensor.base.capture import refuse_capture
from shardwright.tensor.base.gradient_types import ENTERED, REPLICATE
from shardwright.tensor.base.tagging import DTensorBase, alias, empty_outside_mesh, no_torch_function, tag
from shardwright.tensor.redistribute.autograd import redistribute_local
from shardwright.tensor.redistribute.steps import line

__all__ = ["bound_mesh", "for_gradient", "from_local", "layout_of_shards", "one_mesh", "verify_local"]


def bound_mesh(device_mesh: Any) -> Mesh:
    """Return the given mesh; by default that of `with mesh:`, or all ranks in one dimension."""
    return comm.current_mesh() if device_mesh is None else comm.bind(device_mesh)


def one_mesh(name: str, mesh: Any, device_mesh: Any) -> Any:
    """Return the mesh that a function was given as `mesh` or `device_mesh`; raise if both were given."""
    if mesh is not None and device_mesh is not None:
        raise ArgumentTypeError(
            f"{name} takes mesh or device_mesh, which mean the same, but got both: give one of them"
        )
    return device_mesh if mesh is None else mesh


def from_local(
    local_tensor: Tensor,
    device_mesh: Any,
    placements: Sequence[object] | None,
    *,
    run_check: bool | None,
    shape: Sequence[int] | None,
    stride: Sequence[int] | None,
    grad_placements: Sequence[object] | None = None,
) -> Any:
    """See `DTensor.from_local`."""
    if isinstance(local_tensor, DTensorBase) or not isinstance(local_tensor, Tensor):
        raise ArgumentTypeError(f"from_local: expected a plain tensor, got {type(local_tensor).__name__}")
    if stride is not None and shape is None:
        raise TensorError("from_local: stride needs shape: pass both")
    mesh = bound_mesh(device_mesh)
    given: list[Placement] = [REPLICATE] * mesh.ndim if placements is None else [as_placement(p) for p in placements]
    if len(given) != mesh.ndim:
        raise PlacementError(f"from_local: {mesh!r} has {mesh.ndim} dimensions, but {len(given)} placements were given")
    if comm.rank() in mesh:
        layout = _layout(local_tensor, mesh, given, run_check, shape)
        local = alias(local_tensor)
    else:
        layout = Layout(mesh, given, _equal_shards(local_tensor.shape, mesh, given) if shape is None else shape)
        local = empty_outside_mesh(local_tensor, layout)
    if grad_placements is not None:
        with no_torch_function():
            moved = redistribute_local(local, for_gradient(layout, grad_placements), layout)
            local = local if moved is local else moved
    return tag(local, layout)


def for_gradient(layout: Layout, grad_placements: Sequence[object]) -> Layout:
    """Return the layout whose gradient has these placements: a replicate with a partial gradient has entered."""
    given = [as_placement(placement) for placement in grad_placements]
    if len(given) != layout.mesh.ndim:
        raise TensorError(f"grad_placements {given} for {layout}: pass one per mesh dimension")
    placements: list[Placement] = []
    for placement, gradient in zip(layout.placements, given, strict=True):
        if isinstance(gradient, Shard) and gradient.dim < 0:
            gradient = Shard(gradient.dim + layout.ndim)
        if placement.is_replicate() and gradient.is_partial("sum"):
            placements.append(ENTERED)
        elif gradient.is_replicate() if placement.is_partial() else gradient == placement:
            placements.append(placement)
        else:
            raise TensorError(
                f"grad_placements {given} for {layout}: the gradient of {placement} is "
                f"{'Replicate()' if placement.is_partial() else placement}"
                f"{' or Partial()' if placement.is_replicate() else ''}, not {gradient}"
            )
    return layout.replace(placements=placements, order=layout.order)


def verify_local(local: Tensor, layout: Layout) -> None:
    """Raise if this rank's local tensor does not have the shape that the layout gives it."""
    rank = comm.rank()
    if rank in layout.mesh and tuple(local.shape) != layout.local_shape(rank):
        raise LocalTensorError(_misfit(rank, tuple(local.shape), layout))


def layout_of_shards(shapes: Mapping[int, Sequence[int]], mesh: Mesh, placements: list[Placement]) -> Layout:
    """Return the layout in which each rank of the mesh has a local tensor of the shape given for it."""
    described = {rank: _Description(list(shape), [], "", requires_grad=False) for rank, shape in shapes.items()}
    return _deduced(described, mesh, placements)


@dataclass(frozen=True, slots=True)
class _Description:
    """The properties of a rank's local tensor that are sent to the others."""

    shape: list[int]
    stride: list[int]
    dtype: str
    requires_grad: bool
    digest: str = ""  # of the values, if they are compared


def _layout(
    local: Tensor, mesh: Mesh, placements: list[Placement], run_check: bool | None, shape: Sequence[int] | None
) -> Layout:
    sharding = [m for m, p in enumerate(placements) if isinstance(p, Shard | StridedShard) and mesh.shape[m] > 1]
    asked = bool(run_check) or (run_check is None and shape is None and bool(sharding))
    if not asked or local.is_meta or mesh.size == 1:
        layout = Layout(mesh, placements, _equal_shards(local.shape, mesh, placements) if shape is None else shape)
        verify_local(local, layout)
        return layout
    refuse_capture(
        "DTensor.from_local gathers the local sizes of all ranks here, which a captured program would not repeat: "
        "pass shape=, or run_check=False if all shards have the same size"
    )
    described = _gather(local, mesh, placements, everything=bool(run_check))
    _refuse_differences(described, strides=bool(run_check))
    layout = _deduced(described, mesh, placements) if shape is None else Layout(mesh, placements, shape)
    for rank, each in described.items():
        if tuple(each.shape) != layout.local_shape(rank):
            raise LocalTensorError(_misfit(rank, tuple(each.shape), layout))
    _refuse_unlike_replicas(described, layout)
    return layout


def _equal_shards(shape: Sequence[int], mesh: Mesh, placements: Sequence[Placement]) -> list[int]:
    """Return the global shape for local tensors of this shape, if all shards have the same size."""
    whole = list(shape)
    for mesh_dim, placement in enumerate(placements):
        if isinstance(placement, Shard | Ragged | StridedShard):
            dim = _dimension(placement, len(whole))
            whole[dim] = sum(placement.sizes) if isinstance(placement, Ragged) else whole[dim] * mesh.shape[mesh_dim]
    return whole


def _dimension(placement: Shard | Ragged | StridedShard, ndim: int) -> int:
    if not -ndim <= placement.dim < ndim:
        raise LocalTensorError(f"from_local: {placement} is out of range for a local tensor of {ndim} dimensions")
    return placement.dim % ndim


def _gather(local: Tensor, mesh: Mesh, placements: Sequence[Placement], *, everything: bool) -> dict[int, _Description]:
    """Gather the descriptions of local tensors: of all ranks, or of those along the sharding mesh dimensions."""
    dims = tuple(m for m, p in enumerate(placements) if everything or isinstance(p, Shard | Ragged | StridedShard))
    group = comm.group_along(mesh, dims[0]) if len(dims) == 1 else comm.subgroup(sorted(line(mesh, dims, comm.rank())))
    replicated = everything and any(p.is_replicate() and mesh.shape[m] > 1 for m, p in enumerate(placements))
    own = _Description(
        shape=list(local.shape),
        stride=list(local.stride()) if local.layout is torch.strided else [],
        dtype=str(local.dtype),
        requires_grad=local.requires_grad,
        digest=_digest(local) if replicated else "",
    )
    messages = comm.gather_bytes(json.dumps(asdict(own)).encode(), group, what="DTensor.from_local")
    return {rank: _Description(**json.loads(each)) for rank, each in zip(group.ranks, messages, strict=True)}


def _digest(local: Tensor) -> str:
    plain = local.detach().cpu().resolve_conj().resolve_neg().contiguous().reshape(-1)
    return hashlib.blake2b(plain.view(torch.uint8).numpy().data, digest_size=16).hexdigest()


def _refuse_differences(described: Mapping[int, _Description], *, strides: bool) -> None:
    """Raise, on all ranks, if something differs that must be the same on every rank."""
    facts: dict[str, list[Any]] = {
        "numbers of dimensions": [len(each.shape) for each in described.values()],
        "dtypes": [each.dtype for each in described.values()],
        "values of requires_grad": [each.requires_grad for each in described.values()],
    }
    for what, values in facts.items():
        if len(set(values)) > 1:
            raise LocalTensorError(
                f"from_local: the local tensors of ranks {tuple(described)} have different {what}: "
                f"{', '.join(map(str, values))}. Make them the same: they are parts of one tensor"
            )
    if strides and not _strides_agree(list(described.values())):
        listed = "; ".join(f"rank {rank}: {tuple(each.stride)}" for rank, each in described.items())
        raise LocalTensorError(
            f"from_local: the local tensors have different strides ({listed}), so ranks would disagree about which "
            "views need a copy: call contiguous() on each first"
        )


def _strides_agree(described: Sequence[_Description]) -> bool:
    """Return whether all local tensors have their dimensions in the same memory order, all dense or none.

    Dimensions of size 0 and 1 can have any stride. Sizes, and so strides, may differ between ranks.
    """
    before: set[tuple[int, int]] = set()
    kinds: set[tuple[bool, ...]] = set()
    for each in described:
        long = [dim for dim, size in enumerate(each.shape) if size > 1]
        if len(long) < len(each.shape) and 0 in each.shape:
            continue
        before |= {(a, b) for a in long for b in long if each.stride[a] > each.stride[b]}
        step, dense = 1, True
        for dim in sorted(long, key=lambda dim: each.stride[dim]):
            dense = dense and each.stride[dim] == step
            step *= each.shape[dim]
        kinds.add((dense, any(each.stride[dim] == 0 for dim in long)))
    return len(kinds) <= 1 and not any((b, a) in before for a, b in before)


def _deduced(described: Mapping[int, _Description], mesh: Mesh, placements: list[Placement]) -> Layout:
    """Return the layout that fits the local shapes: even shards if possible, else given sizes (`Ragged`)."""
    first = mesh.coordinate(min(described))
    shape = list(described[min(described)].shape)
    sharded_by: dict[int, list[int]] = {}
    for mesh_dim, placement in enumerate(placements):
        if isinstance(placement, Shard | Ragged | StridedShard):
            sharded_by.setdefault(_dimension(placement, len(shape)), []).append(mesh_dim)
    ragged = list(placements)
    for dim, (outermost, *inner) in sharded_by.items():
        sizes = []
        for index in range(mesh.shape[outermost]):
            within = [slice(None) if m in inner else index if m == outermost else first[m] for m in range(mesh.ndim)]
            sizes.append(sum(described[rank].shape[dim] for rank in mesh.array[tuple(within)].reshape(-1).tolist()))
        shape[dim] = sum(sizes)
        if isinstance(placements[outermost], Shard):
            ragged[outermost] = Ragged(dim, sizes)
    layout = Layout(mesh, placements, shape)
    if any(tuple(each.shape) != layout.local_shape(rank) for rank, each in described.items()):
        uneven = _mixed(layout, ragged, described)
        if uneven is not None:
            return uneven
        listed = "; ".join(f"rank {rank}: {tuple(each.shape)}" for rank, each in described.items())
        raise LocalTensorError(
            f"from_local: local tensors of these shapes are not shards of one tensor placed as "
            f"({', '.join(map(str, placements))}): {listed}. Pad or trim them, or pass the global shape and other "
            "placements"
        )
    return layout


def _mixed(even: Layout, ragged: Sequence[Placement], described: Mapping[int, _Description]) -> Layout | None:
    """Return the layout with `Ragged` only on the mesh dimensions that need it; None if that does not fit either."""
    now = list(even.placements)
    for mesh_dim, placement in enumerate(ragged):
        if not isinstance(placement, Ragged) or isinstance(now[mesh_dim], Ragged):
            continue
        dim = placement.dim
        if any(each.shape[dim] != even.local_shape(rank)[dim] for rank, each in described.items()):
            now[mesh_dim] = placement
    layout = Layout(even.mesh, now, even.shape)
    fits = all(tuple(each.shape) == layout.local_shape(rank) for rank, each in described.items())
    return layout if fits else None


def _misfit(rank: int, shape: tuple[int, ...], layout: Layout) -> str:
    return (
        f"from_local: rank {rank} has a local tensor of shape {shape}, but its part of {layout} has shape "
        f"{layout.local_shape(rank)}"
    )


def _refuse_unlike_replicas(described: Mapping[int, _Description], layout: Layout) -> None:
    for rank, each in described.items():
        original = min(layout.replicas(rank))
        if described.get(original, each).digest != each.digest:
            raise LocalTensorError(
                f"from_local: ranks {original} and {rank} hold replicas of one part of {layout}, but their values "
                "differ. Use distribute_tensor, which sends one rank's values to all, or make them the same"
            )
