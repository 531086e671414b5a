"""Movements between layouts as autograd sees them: each one's backward applies the dual movement.

The dual of a movement from `a` to `b` goes from `dual(b)` to `dual(a)`: that one line is the whole table of the
gradient contract, and because the backward is a movement again, gradients of gradients are right too.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from shardwright import comm
from shardwright.errors import CommError, PartialGradientError
from shardwright.layout import Layout, Partial
from shardwright.tensor.base import divergence, trace
from shardwright.tensor.base.capture import as_step, is_recording
from shardwright.tensor.base.custom_op import call_operator, define_operator, is_traced
from shardwright.tensor.base.gradient_types import dual
from shardwright.tensor.redistribute.execute import execute, local_shape
from shardwright.tensor.redistribute.planner import plan

__all__ = ["differs", "redistribute_local", "shares", "summed_up", "unaveraged"]


def differs(source: Layout, target: Layout) -> bool:
    """Whether anything must be done: placements on mesh dimensions of one rank make no difference."""
    if source is target:
        return False
    if source.mesh is not target.mesh:
        return True
    if source.order != target.order and _cutting_order(source) != _cutting_order(target):
        return True
    return any(
        a != b and ranks > 1
        for a, b, ranks in zip(source.placements, target.placements, source.mesh.shape, strict=True)
    )


def _cutting_order(layout: Layout) -> list[int]:
    """The order in which mesh dimensions cut, without those of one rank, which cut nothing."""
    return [mesh_dim for mesh_dim in layout.order if layout.mesh.shape[mesh_dim] > 1]


def redistribute_local(local: Tensor, source: Layout, target: Layout) -> Tensor:
    """The local tensor under `target`, differentiably. Call it where torch functions are not intercepted."""
    if not differs(source, target):
        return local
    if is_recording():
        return as_step(redistribute_local, local, source, target)  # type: ignore[no-any-return]  # it is this function's
    if not (local.requires_grad and torch.is_grad_enabled()):
        return _redistribute(local, source, target)
    scaled, summed = summed_up(local, source)
    share, sums = shares(target)
    moved: Tensor = scaled
    if differs(summed, sums):
        moved = Redistribute.apply(scaled, summed, sums)  # type: ignore[no-untyped-call]  # torch's apply is untyped
    return moved if share == 1.0 else moved / share


def summed_up(local: Tensor, source: Layout) -> tuple[Tensor, Layout]:
    """Return the local tensor and its layout with averages as sums; raise for other reductions, without gradients."""
    scaled, summed = unaveraged(local, source)
    for placement in summed.placements:
        if isinstance(placement, Partial) and placement.op != "sum":
            raise PartialGradientError(
                f"{source} holds {placement}, which has no gradient: reduce it where no gradient is needed "
                "(`x.detach().redistribute(...)`), or compute the reduction with torch.amax or torch.amin"
            )
    return scaled, summed


def unaveraged(local: Tensor, layout: Layout) -> tuple[Tensor, Layout]:
    """Averages as sums of shares, so that only sums are left to differentiate."""
    share, sums = shares(layout)
    return (local if share == 1.0 else local * share), sums


def shares(layout: Layout) -> tuple[float, Layout]:
    """What share of the whole each addend of an average is, and the layout of the sum of such shares."""
    share = 1.0
    placements = list(layout.placements)
    for mesh_dim, placement in enumerate(placements):
        if isinstance(placement, Partial) and placement.op == "avg":
            share /= layout.mesh.shape[mesh_dim]
            placements[mesh_dim] = Partial("sum")
    if tuple(placements) == layout.placements:
        return 1.0, layout
    return share, layout.replace(placements=placements, order=layout.order)


class Redistribute(torch.autograd.Function):
    """One movement, and its dual on the way back."""

    @staticmethod
    def forward(ctx: Any, local: Tensor, source: Layout, target: Layout) -> Tensor:
        ctx.source, ctx.target, ctx.shape = source, target, local.shape
        return _redistribute(local, source, target)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        moved = redistribute_local(gradient, dual(ctx.target), dual(ctx.source))
        if moved.shape != ctx.shape:  # on a rank outside the source's mesh, whose tensor may have had any shape
            moved = moved.new_zeros(ctx.shape)
        return moved, None, None


def _redistribute(local: Tensor, source: Layout, target: Layout) -> Tensor:
    return call_operator(local, source, target) if is_traced() else _redistribute_now(local, source, target)


def _redistribute_now(local: Tensor, source: Layout, target: Layout) -> Tensor:
    steps = plan(source, target, local.element_size())
    if trace.current() is not None:
        received = steps.received_bytes(comm.rank())
        trace.note_redistribution(source, target, received, torch._C._current_graph_task_id() != -1)
    if local.is_meta:
        return torch.empty(local_shape(target, comm.rank()), dtype=local.dtype, device="meta")
    divergence.compare_notes(source, target)
    with torch.no_grad():
        local = local.clone() if local._is_zerotensor() else local  # zeros that autograd has not made yet
        try:
            moved = execute(steps, local)
        except CommError as error:
            raise divergence.post_mortem(source, target, error) from None
    # An alias, never the input itself: autograd takes a returned input for "unchanged", and nobody may tag it.
    # Otherwise memory of its own; a view of the buffer it came in would refuse to be written to in place.
    return moved.view_as(moved) if moved is local else moved.data


_library = define_operator(_redistribute_now)
