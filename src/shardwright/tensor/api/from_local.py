"""`DTensor.from_local`: local tensors made one DTensor, and what the ranks tell each other about them first.

Without a global shape, the local sizes along sharded dimensions decide it, and only the ranks together know them: they
are gathered, in one small message over the control channel of the mesh dimensions that shard. That message also says
dtype and `requires_grad`, which cost nothing more and must be the same on every rank.
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
    """Return the mesh that was given; if it is None, that of `with mesh:`, or all ranks in one dimension."""
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
        raise ArgumentTypeError(f"from_local: {type(local_tensor).__name__} is not a plain tensor")
    if stride is not None and shape is None:
        raise TensorError("from_local: stride without shape says nothing: give both")
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
        raise TensorError(f"grad_placements {given} for {layout}: give one per mesh dimension")
    placements: list[Placement] = []
    for placement, gradient in zip(layout.placements, given, strict=True):
        if isinstance(gradient, Shard) and gradient.dim < 0:
            gradient = Shard(gradient.dim + layout.ndim)
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


def verify_local(local: Tensor, layout: Layout) -> None:
    """Raise if this rank's local tensor does not have the shape that the layout gives it."""
    rank = comm.rank()
    if rank in layout.mesh and tuple(local.shape) != layout.local_shape(rank):
        raise LocalTensorError(_misfit(rank, tuple(local.shape), layout))


def layout_of_shards(shapes: Mapping[int, Sequence[int]], mesh: Mesh, placements: list[Placement]) -> Layout:
    """Return the layout in which each rank of the mesh has a local tensor of the shape given for it."""
    found = {rank: _Description(list(shape), [], "", requires_grad=False) for rank, shape in shapes.items()}
    return _deduced(found, mesh, placements)


@dataclass(frozen=True, slots=True)
class _Description:
    """What one rank tells the others of its local tensor."""

    shape: list[int]
    stride: list[int]
    dtype: str
    requires_grad: bool
    digest: str = ""  # of its values, where they are compared


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
        "give shape=, or run_check=False where all shards have one size"
    )
    found = _gather(local, mesh, placements, everything=bool(run_check))
    _refuse_differences(found, strides=bool(run_check))
    layout = _deduced(found, mesh, placements) if shape is None else Layout(mesh, placements, shape)
    for rank, each in found.items():
        if tuple(each.shape) != layout.local_shape(rank):
            raise LocalTensorError(_misfit(rank, tuple(each.shape), layout))
    _refuse_unlike_replicas(found, layout)
    return layout


def _equal_shards(shape: Sequence[int], mesh: Mesh, placements: Sequence[Placement]) -> list[int]:
    """Return the global shape of local tensors of this shape, if all shards are of one size."""
    whole = list(shape)
    for mesh_dim, placement in enumerate(placements):
        if isinstance(placement, Shard | Ragged | StridedShard):
            dim = _dimension(placement, len(whole))
            whole[dim] = sum(placement.sizes) if isinstance(placement, Ragged) else whole[dim] * mesh.shape[mesh_dim]
    return whole


def _dimension(placement: Shard | Ragged | StridedShard, ndim: int) -> int:
    if not -ndim <= placement.dim < ndim:
        raise LocalTensorError(f"from_local: {placement} on a local tensor of {ndim} dimensions: it is out of range")
    return placement.dim % ndim


def _gather(local: Tensor, mesh: Mesh, placements: Sequence[Placement], *, everything: bool) -> dict[int, _Description]:
    """Return what the ranks say of their local tensors: all of the mesh, or those along the dimensions that shard."""
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


def _refuse_differences(found: Mapping[int, _Description], *, strides: bool) -> None:
    """Raise, on all ranks alike, if something differs that must be the same on every rank."""
    facts: dict[str, list[Any]] = {
        "numbers of dimensions": [len(each.shape) for each in found.values()],
        "dtypes": [each.dtype for each in found.values()],
        "values of requires_grad": [each.requires_grad for each in found.values()],
    }
    for what, values in facts.items():
        if len(set(values)) > 1:
            raise LocalTensorError(
                f"from_local: the local tensors of ranks {tuple(found)} have different {what}: "
                f"{', '.join(map(str, values))}. They are parts of one tensor: make them alike"
            )
    if strides and not _strides_agree(list(found.values())):
        listed = "; ".join(f"rank {rank}: {tuple(each.stride)}" for rank, each in found.items())
        raise LocalTensorError(
            f"from_local: the local tensors have different strides ({listed}): the ranks would disagree on which "
            "views need a copy. Call contiguous() on each first"
        )


def _strides_agree(found: Sequence[_Description]) -> bool:
    """Return whether one order of dimensions in memory, dense or not, fits the local tensors of all ranks.

    Dimensions of size 0 and 1 can have any stride. Sizes differ between ranks, and strides with them.
    """
    before: set[tuple[int, int]] = set()
    kinds: set[tuple[bool, ...]] = set()
    for each in found:
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


def _deduced(found: Mapping[int, _Description], mesh: Mesh, placements: list[Placement]) -> Layout:
    """Return the layout that gives every rank what it has: even shards if they are, else given sizes (`Ragged`)."""
    first = mesh.coordinate(min(found))
    shape = list(found[min(found)].shape)
    cuts: dict[int, list[int]] = {}
    for mesh_dim, placement in enumerate(placements):
        if isinstance(placement, Shard | Ragged | StridedShard):
            cuts.setdefault(_dimension(placement, len(shape)), []).append(mesh_dim)
    ragged = list(placements)
    for dim, (outermost, *inner) in cuts.items():
        sizes = []
        for index in range(mesh.shape[outermost]):
            where = [slice(None) if m in inner else index if m == outermost else first[m] for m in range(mesh.ndim)]
            sizes.append(sum(found[rank].shape[dim] for rank in mesh.array[tuple(where)].reshape(-1).tolist()))
        shape[dim] = sum(sizes)
        if isinstance(placements[outermost], Shard):
            ragged[outermost] = Ragged(dim, sizes)
    layout = Layout(mesh, placements, shape)
    if any(tuple(each.shape) != layout.local_shape(rank) for rank, each in found.items()):
        uneven = _mixed(layout, ragged, found)
        if uneven is not None:
            return uneven
        listed = "; ".join(f"rank {rank}: {tuple(each.shape)}" for rank, each in found.items())
        raise LocalTensorError(
            f"from_local: local tensors of these shapes are not shards of one tensor placed as "
            f"({', '.join(map(str, placements))}): {listed}. Pad or trim them, or give the shape and placements "
            "they are parts of"
        )
    return layout


def _mixed(even: Layout, ragged: Sequence[Placement], found: Mapping[int, _Description]) -> Layout | None:
    """Return the layout with given sizes on the mesh dimensions that need them; None if that does not fit either."""
    now = list(even.placements)
    for mesh_dim, placement in enumerate(ragged):
        if not isinstance(placement, Ragged) or isinstance(now[mesh_dim], Ragged):
            continue
        dim = placement.dim
        if any(each.shape[dim] != even.local_shape(rank)[dim] for rank, each in found.items()):
            now[mesh_dim] = placement
    layout = Layout(even.mesh, now, even.shape)
    fits = all(tuple(each.shape) == layout.local_shape(rank) for rank, each in found.items())
    return layout if fits else None


def _misfit(rank: int, shape: tuple[int, ...], layout: Layout) -> str:
    return (
        f"from_local: rank {rank} has a local tensor of shape {shape}, but its part of {layout} has shape "
        f"{layout.local_shape(rank)}"
    )


def _refuse_unlike_replicas(found: Mapping[int, _Description], layout: Layout) -> None:
    for rank, each in found.items():
        original = min(layout.replicas(rank))
        if found.get(original, each).digest != each.digest:
            raise LocalTensorError(
                f"from_local: ranks {original} and {rank} hold replicas of one part of {layout}, but their values "
                "differ. Use distribute_tensor, which sends one rank's values to all, or make them the same"
            )
