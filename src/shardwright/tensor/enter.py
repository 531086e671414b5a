"""Parameters that enter operators: gathered or entered once, reduced once, however often they are used in a step.

Every use of a parameter in a step shares one movement, so autograd adds the gradients of all uses up before the one
reduction. The shared result is kept until the end of the backward pass. It is found again only while the parameter
is the same (version and memory) and gradients are recorded as they were.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor

from shardwright.layout import Layout
from shardwright.tensor.local import DTensorBase, no_torch_function, tag
from shardwright.tensor.movement import move
from shardwright.tensor.types import ENTERED, dual, settled

__all__ = ["defer_gradient_reduction", "forget_entered", "move_operand"]

MAX_ENTERED = 8192


class _Shared(NamedTuple):
    result: Tensor
    version: int
    memory: int
    owner: DTensorBase  # keeps the id that is the key from being reused


_shared: dict[tuple[int, Layout], _Shared] = {}
_deferred: dict[int, list[_Deferral]] | None = None


class _Deferral(NamedTuple):
    parameter: DTensorBase
    layout: Layout  # of the gradient as it accumulates
    gradient: list[Tensor]  # one tensor, replaced as it grows


def move_operand(tensor: DTensorBase, source: Layout, target: Layout) -> Tensor:
    """An operand brought to where its operator wants it; shared where it is a parameter that enters."""
    if not (tensor.requires_grad and torch.is_grad_enabled() and tensor.is_leaf and ENTERED in target.placements):
        return move(tensor, source, target)
    key = (id(tensor), target)
    known = _shared.get(key)
    version, memory = tensor._version, tensor.data_ptr()
    if known is not None and known.owner is tensor and (known.version, known.memory) == (version, memory):
        return known.result
    result: Tensor = EnterParameter.apply(tensor, source, target)  # type: ignore[no-untyped-call]  # torch's is untyped
    if len(_shared) >= MAX_ENTERED:
        _shared.clear()
    _shared[key] = _Shared(result, version, memory, tensor)
    return result


def forget_entered() -> None:
    """Drops what is shared: the step is over."""
    _shared.clear()


class EnterParameter(torch.autograd.Function):
    """The movement of a parameter into an operator: its backward reduces, now or when deferral ends."""

    @staticmethod
    def forward(ctx: Any, parameter: DTensorBase, source: Layout, target: Layout) -> Tensor:
        ctx.parameter, ctx.source, ctx.target = parameter, source, target
        with torch.no_grad():
            moved = move(parameter, source, target)
        return moved.view_as(moved) if moved is parameter else moved

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, None, None]:
        torch.autograd.Variable._execution_engine.queue_callback(forget_entered)
        if _deferred is not None and not torch.is_grad_enabled():
            _defer(ctx.parameter, dual(ctx.target), gradient)
            return None, None, None
        return move(gradient, dual(ctx.target), dual(ctx.source)), None, None


@contextmanager
def defer_gradient_reduction() -> Iterator[None]:
    """Accumulates the gradients of parameters over several backward passes, and reduces them once, at the end.

    Inside, gradients that need a reduction are kept back, unreduced: `.grad` holds them only after the context ends.

    >>> import shardwright as sw
    >>> with sw.defer_gradient_reduction():
    ...     pass  # several micro-batches: forward, backward
    """
    global _deferred
    if _deferred is not None:  # the outermost context reduces
        yield
        return
    _deferred = {}
    try:
        yield
        waiting = [deferral for deferrals in _deferred.values() for deferral in deferrals]
    finally:
        _deferred = None
    with no_torch_function(), torch.no_grad():
        for deferral in waiting:
            layout = settled(dual(deferral.parameter._layout))
            reduced = move(deferral.gradient[0], deferral.layout, layout)
            if deferral.parameter.grad is None:
                deferral.parameter.grad = tag(reduced.detach(), layout)
            else:
                deferral.parameter.grad += reduced


def _defer(parameter: DTensorBase, layout: Layout, gradient: Tensor) -> None:
    assert _deferred is not None
    deferrals = _deferred.setdefault(id(parameter), [])
    for deferral in deferrals:
        if deferral.layout is layout:
            deferral.gradient[0] = deferral.gradient[0] + gradient
            return
    deferrals.append(_Deferral(parameter, layout, [gradient.clone()]))
