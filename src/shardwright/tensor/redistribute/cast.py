"""Redistribution in another dtype: the value is cast before it is sent, and its gradient before it is sent back.

A cast that could round or wrap the partial values of a sum is made after the sum is complete, as `Tensor.to` makes it.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from shardwright.errors import ArgumentTypeError, TensorError
from shardwright.layout import Layout, Placement
from shardwright.tensor.base.capture import capture_call, is_capturing
from shardwright.tensor.base.gradient_types import REPLICATE, dual
from shardwright.tensor.base.rounding import keeps_every_value
from shardwright.tensor.redistribute.autograd import (
    average_factor,
    differentiable_sums,
    needs_redistribution,
    redistribute_local,
)

__all__ = ["cast_and_redistribute", "cast_before_sending", "check_dtypes"]


def check_dtypes(forward: Any, backward: Any) -> None:
    """Raise unless both are dtypes or None, and `backward` can hold a gradient."""
    for name, dtype in (("forward_dtype", forward), ("backward_dtype", backward)):
        if dtype is not None and not isinstance(dtype, torch.dtype):
            raise ArgumentTypeError(f"redistribute: {name} must be a torch.dtype, got {type(dtype).__name__} {dtype!r}")
    if backward is not None and not _has_gradients(backward):
        raise TensorError(
            f"redistribute: backward_dtype {backward} cannot hold a gradient: pass a floating or complex dtype"
        )


def cast_and_redistribute(
    local: Tensor, source: Layout, target: Layout, forward: torch.dtype, backward: torch.dtype
) -> Tensor:
    """Return the local tensor under `target` in dtype `forward`, differentiably; gradients are sent in `backward`.

    The gradient arrives in the dtype of `local`. Call it where torch functions are not intercepted.
    """
    if local.dtype == forward and not needs_redistribution(source, target):
        return local
    if is_capturing():
        return capture_call(cast_and_redistribute, local, source, target, forward, backward)  # type: ignore[no-any-return]  # this function's
    if not (local.requires_grad and torch.is_grad_enabled() and _has_gradients(forward)):
        with torch.no_grad():
            return _cast_and_redistribute(local, source, target, forward)
    scaled, summed = differentiable_sums(local, source)
    factor, sums = average_factor(target)
    moved: Tensor = _CastAndRedistribute.apply(scaled, summed, sums, forward, backward)  # type: ignore[no-untyped-call]  # torch's
    return moved if factor == 1.0 else moved / factor


def cast_before_sending(source: Layout, before: torch.dtype, after: torch.dtype) -> bool:
    """Return whether a cast between these dtypes may be made on the local tensors of this layout."""
    return not source.is_partial or keeps_every_value(before, after)


class _CastAndRedistribute(torch.autograd.Function):
    """A cast and a redistribution; the backward is the dual redistribution between two casts."""

    @staticmethod
    def forward(
        ctx: Any, local: Tensor, source: Layout, target: Layout, forward: torch.dtype, backward: torch.dtype
    ) -> Tensor:
        ctx.source, ctx.target, ctx.shape = source, target, local.shape
        ctx.before, ctx.sent_as = local.dtype, backward
        return _cast_and_redistribute(local, source, target, forward)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        back = dual(ctx.source)
        moved = _cast_and_redistribute(gradient, dual(ctx.target), back, ctx.sent_as)
        moved = _cast_and_redistribute(moved, back, back, ctx.before)
        if moved.shape != ctx.shape:  # on a rank outside the source's mesh, whose tensor may have had any shape
            moved = moved.new_zeros(ctx.shape)
        return moved, None, None, None, None


def _cast_and_redistribute(local: Tensor, source: Layout, target: Layout, dtype: torch.dtype) -> Tensor:
    if local.dtype == dtype or cast_before_sending(source, local.dtype, dtype):
        return redistribute_local(local.to(dtype), source, target)
    completed = _completed(source, target)
    return redistribute_local(redistribute_local(local, source, completed).to(dtype), completed, target)


def _completed(source: Layout, target: Layout) -> Layout:
    """Return the layout in which the sums of `source` are complete, on the way to `target`."""
    if source.mesh is not target.mesh:
        placements = [_complete(placement) for placement in target.placements]
        return target.replace(placements=placements, order=target.order)
    placements = [
        _complete(after) if before.is_partial() else before
        for before, after in zip(source.placements, target.placements, strict=True)
    ]
    return target.replace(placements=placements, order=target.order)


def _complete(placement: Placement) -> Placement:
    return REPLICATE if placement.is_partial() else placement


def _has_gradients(dtype: torch.dtype) -> bool:
    return dtype.is_floating_point or dtype.is_complex
