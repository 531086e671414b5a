"""Redistribution as an autograd function: its backward is the dual redistribution.

The dual of a redistribution from `a` to `b` goes from `dual(b)` to `dual(a)`: that line is the whole gradient contract.
Because the backward is again a redistribution, higher-order gradients work too.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from shardwright import comm
from shardwright.errors import CommError, PartialGradientError, UnsupportedError
from shardwright.layout import Layout, Partial
from shardwright.listing import join_first
from shardwright.tensor.base import divergence, trace
from shardwright.tensor.base.capture import capture_call, is_capturing
from shardwright.tensor.base.custom_op import call_operator, define_operator, is_traced
from shardwright.tensor.base.gradient_types import dual
from shardwright.tensor.redistribute.execute import execute, local_shape
from shardwright.tensor.redistribute.planner import plan

__all__ = [
    "average_factor",
    "averages_as_sums",
    "differentiable_sums",
    "needs_redistribution",
    "redistribute_local",
    "refuse_lost_graph",
]


def needs_redistribution(source: Layout, target: Layout) -> bool:
    """Return whether the layouts need a redistribution; placements on size-1 mesh dimensions do not count."""
    if source is target:
        return False
    if source.mesh is not target.mesh:
        return True
    if source.order != target.order and _sharding_order(source) != _sharding_order(target):
        return True
    return any(
        a != b and ranks > 1
        for a, b, ranks in zip(source.placements, target.placements, source.mesh.shape, strict=True)
    )


def _sharding_order(layout: Layout) -> list[int]:
    """Return the order in which mesh dimensions shard, without those of size 1."""
    return [mesh_dim for mesh_dim in layout.order if layout.mesh.shape[mesh_dim] > 1]


def redistribute_local(local: Tensor, source: Layout, target: Layout) -> Tensor:
    """Return the local tensor under `target`, differentiably. Call it where torch functions are not intercepted."""
    if not needs_redistribution(source, target):
        return local
    if is_capturing():
        return capture_call(redistribute_local, local, source, target)  # type: ignore[no-any-return]  # it is this function's
    if not (local.requires_grad and torch.is_grad_enabled()):
        return _redistribute(local, source, target)
    scaled, summed = differentiable_sums(local, source)
    factor, sums = average_factor(target)
    moved: Tensor = scaled
    if needs_redistribution(summed, sums):
        moved = Redistribute.apply(scaled, summed, sums)  # type: ignore[no-untyped-call]  # torch's apply is untyped
    return moved if factor == 1.0 else moved / factor


def differentiable_sums(local: Tensor, source: Layout) -> tuple[Tensor, Layout]:
    """Return the local tensor and its layout with averages as sums; raise if a reduction has no gradient."""
    scaled, summed = averages_as_sums(local, source)
    for placement in summed.placements:
        if isinstance(placement, Partial) and placement.op != "sum":
            raise PartialGradientError(
                f"{source} holds {placement}, which has no gradient: reduce it where no gradient is needed "
                "(`x.detach().redistribute(...)`), or compute the reduction with torch.amax or torch.amin"
            )
    return scaled, summed


def averages_as_sums(local: Tensor, layout: Layout) -> tuple[Tensor, Layout]:
    """Return the local tensor and its layout with averages rewritten as sums, which are differentiable."""
    factor, sums = average_factor(layout)
    return (local if factor == 1.0 else local * factor), sums


def average_factor(layout: Layout) -> tuple[float, Layout]:
    """Return the factor by which partial values of `avg` become partial values of `sum`, and the layout of that sum."""
    factor = 1.0
    placements = list(layout.placements)
    for mesh_dim, placement in enumerate(placements):
        if isinstance(placement, Partial) and placement.op == "avg":
            factor /= layout.mesh.shape[mesh_dim]
            placements[mesh_dim] = Partial("sum")
    if tuple(placements) == layout.placements:
        return 1.0, layout
    return factor, layout.replace(placements=placements, order=layout.order)


class Redistribute(torch.autograd.Function):
    """A redistribution; its backward is the dual one."""

    @staticmethod
    def forward(ctx: Any, local: Tensor, source: Layout, target: Layout) -> Tensor:
        ctx.source, ctx.target, ctx.shape = source, target, local.shape
        return _redistribute(local, source, target)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        refuse_lost_graph(gradient, dual(ctx.target), dual(ctx.source))
        moved = redistribute_local(gradient, dual(ctx.target), dual(ctx.source))
        if moved.shape != ctx.shape:  # on a rank outside the source's mesh, whose tensor may have had any shape
            moved = moved.new_zeros(ctx.shape)
        return moved, None, None


def refuse_lost_graph(gradient: Tensor, source: Layout, target: Layout) -> None:
    """With `create_graph=True`, raise UnsupportedError on all ranks if only some have a graph of this gradient.

    torch's gradient of a write to a view has no graph where the shard is empty. Ranks without one would not take part
    in the communication of the next backward pass.
    """
    ranks = tuple(sorted({*source.mesh.ranks, *target.mesh.ranks}))
    if not torch.is_grad_enabled() or gradient.is_meta or is_traced() or len(ranks) == 1 or comm.rank() not in ranks:
        return
    flags = comm.gather_bytes(b"1" if gradient.requires_grad else b"", comm.subgroup(ranks), what="create_graph")
    if any(flags) and not all(flags):
        lost = [rank for rank, flag in zip(ranks, flags, strict=True) if not flag]
        raise UnsupportedError(
            f"create_graph=True: rank {join_first(lost, 8)} has no graph of a gradient {source}, and other ranks have "
            "one, because a view was written to whose shard there is empty: replace the write by an out-of-place "
            "operator (y = y * w instead of y *= w)"
        )


def _redistribute(local: Tensor, source: Layout, target: Layout) -> Tensor:
    """Redistribute without recording a gradient; under a tracer of torch, as one operator."""
    return call_operator(local, source, target) if is_traced() else _redistribute_now(local, source, target)


def _redistribute_now(local: Tensor, source: Layout, target: Layout) -> Tensor:
    """Plan the redistribution, record it in the open trace, and execute it; on meta tensors, only give the shape."""
    steps = plan(source, target, local.element_size())
    if trace.current() is not None:
        received = steps.received_bytes(comm.rank())
        trace.record_redistribution(source, target, received, torch._C._current_graph_task_id() != -1)
    if local.is_meta and not comm.is_simulated():
        return torch.empty(local_shape(target, comm.rank()), dtype=local.dtype, device="meta")
    divergence.check_same_program(source, target)
    with torch.no_grad():
        local = local.clone() if local._is_zerotensor() else local  # zeros that autograd has not materialized
        try:
            moved = execute(steps, local)
        except CommError as error:
            raise divergence.post_mortem(source, target, error) from None
    # Never return the input itself: autograd treats a returned input as unchanged, and tagging it would change the
    # caller's tensor. Otherwise return `.data`: a view of the receive buffer could not be written to in place.
    return moved.view_as(moved) if moved is local else moved.data


_library = define_operator(_redistribute_now)
