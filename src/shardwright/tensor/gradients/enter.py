"""Parameters that enter operators: gathered or entered once, reduced once, however often they are used in a step.

Every use of a parameter in a step shares one movement, so autograd adds the gradients of all uses up before the one
reduction. The shared result is kept until the end of the next backward pass, and is found again only while the
parameter has not been written to. Whether it is found must be decided alike on every rank, or they would wait for each
other: so it hangs on what the program did, never on memory or on when Python frees something. `.data` writes past
autograd's version counter: a parameter whose `.data` was read is not shared any more. Nor is a gathered one while
saved tensors are handed to hooks, as activation checkpointing does: it is meant to be freed.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor

from shardwright.layout import Layout
from shardwright.tensor.base.capture import capture_call, is_capturing
from shardwright.tensor.base.custom_op import is_traced
from shardwright.tensor.base.gradient_types import ENTERED, dual, without_entered
from shardwright.tensor.base.tagging import DTensorBase, no_torch_function, tag
from shardwright.tensor.redistribute.autograd import differs, redistribute_local

__all__ = ["defer_gradient_reduction", "forget_entered", "prepare_operand", "reduce_immediately"]

MAX_ENTERED = 8192


class _Shared(NamedTuple):
    result: Tensor
    version: int
    owner: DTensorBase  # keeps the id that is the key from being reused


_shared: dict[tuple[int, Layout], _Shared] = {}
_deferred: dict[int, list[_Deferral]] | None = None
_reducing_now = False  # inside torch.autograd.grad, which gives its gradients back at once


class _Deferral(NamedTuple):
    parameter: DTensorBase
    layout: Layout  # of the gradient as it accumulates
    gradient: list[Tensor]  # one tensor, replaced as it grows


def prepare_operand(tensor: DTensorBase, source: Layout, target: Layout) -> Tensor:
    """An operand redistributed to where its operator wants it; shared where it is a parameter that enters."""
    if not (tensor.requires_grad and torch.is_grad_enabled() and tensor.is_leaf and ENTERED in target.placements):
        return redistribute_local(tensor, source, target)
    if is_capturing():
        return capture_call(prepare_operand, tensor, source, target)  # type: ignore[no-any-return]  # it is this function's
    if is_traced() and _saving_is_hooked():
        # Selective checkpointing counts the operators of a forward, and of the one that is computed again.
        return EnterParameter.apply(tensor, source, target)  # type: ignore[no-untyped-call, no-any-return]  # as below
    key = (id(tensor), target)
    known = _shared.get(key)
    version = tensor._version
    if known is not None and known.owner is tensor and known.version == version and "_untracked" not in tensor.__dict__:
        return known.result
    result: Tensor = EnterParameter.apply(tensor, source, target)  # type: ignore[no-untyped-call]  # torch's is untyped
    if "_untracked" in tensor.__dict__ or (differs(source, without_entered(target)) and _saving_is_hooked()):
        return result
    if len(_shared) >= MAX_ENTERED:
        _shared.clear()
    _shared[key] = _Shared(result, version, tensor)
    return result


def _saving_is_hooked() -> bool:
    return torch._C._autograd._top_saved_tensors_default_hooks(True) is not None


def forget_entered() -> None:
    """Drops what is shared: the step is over, or a parameter has become another."""
    _shared.clear()


@contextmanager
def reduce_immediately() -> Iterator[None]:
    """Has gradients reduced where they arise, deferral or not: they are about to be given back."""
    global _reducing_now
    before, _reducing_now = _reducing_now, True
    try:
        yield
    finally:
        _reducing_now = before


class EnterParameter(torch.autograd.Function):
    """The movement of a parameter into an operator: its backward reduces, now or when deferral ends."""

    @staticmethod
    def forward(ctx: Any, parameter: DTensorBase, source: Layout, target: Layout) -> Tensor:
        ctx.parameter, ctx.source, ctx.target = parameter, source, target
        with torch.no_grad():
            moved = redistribute_local(parameter, source, target)
        return moved.view_as(moved) if moved is parameter else moved

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, None, None]:
        torch.autograd.Variable._execution_engine.queue_callback(forget_entered)
        if _deferred is not None and not (_reducing_now or torch.is_grad_enabled() or _has_hooks(ctx.parameter)):
            _defer(ctx.parameter, dual(ctx.target), gradient)
            return None, None, None
        return redistribute_local(gradient, dual(ctx.target), dual(ctx.source)), None, None


def _has_hooks(parameter: DTensorBase) -> bool:
    """Whether somebody waits for this parameter's gradient: then it is reduced at once."""
    with no_torch_function():
        return bool(parameter._backward_hooks) or bool(getattr(parameter, "_post_accumulate_grad_hooks", None))


@contextmanager
def defer_gradient_reduction() -> Iterator[None]:
    """Accumulates the gradients of parameters over several backward passes, and reduces them once, at the end.

    Inside, gradients that need a reduction are kept back, unreduced: `.grad` holds them only after the context ends.
    Parameters with hooks on their gradient, and `torch.autograd.grad`, get theirs reduced at once.

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
            layout = without_entered(dual(deferral.parameter._layout))
            reduced = redistribute_local(deferral.gradient[0], deferral.layout, layout)
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
