"""Redistribute parameters into operators once per step, and reduce their gradients once, however often they are used.

All uses of a parameter in a step share one redistribution, so autograd accumulates the gradients of all uses before the
single reduction. The shared result is kept until the end of the next backward pass, and reused only if the parameter
was not written to, in place or through `.data`. All ranks must take the same decision, or they would wait for each
other: so it depends on the writes of the program, never on memory, on when Python frees an object, or on what one rank
alone reads. A gathered parameter is not shared while saved-tensor hooks are active, as in activation checkpointing,
which is meant to free it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor

from shardwright.layout import Layout
from shardwright.tensor.base.capture import capture_call, is_capturing
from shardwright.tensor.base.custom_op import is_traced
from shardwright.tensor.base.gradient_types import ENTERED, dual, without_entered
from shardwright.tensor.base.tagging import DTensorBase, no_torch_function, tag
from shardwright.tensor.base.writes import MemoryVersion, memory_version, was_written
from shardwright.tensor.gradients.aliased import refuse_aliased_write
from shardwright.tensor.gradients.gather_together import gathered_by_unit
from shardwright.tensor.gradients.share import forget_shared, redistribute_shared, results_by_tensor
from shardwright.tensor.redistribute.autograd import needs_redistribution, redistribute_local, refuse_lost_graph
from shardwright.tensor.redistribute.cast import cast_and_redistribute

__all__ = [
    "call_after_deferral",
    "defer_gradient_reduction",
    "forget_entered",
    "is_deferring",
    "prepare_cast_operand",
    "prepare_operand",
    "reduce_immediately",
]

MAX_ENTERED = 8192


class _Shared(NamedTuple):
    result: Tensor
    # That of the parameter's memory. If the result is a view of that memory: autograd's version, and the address of the
    # C++ object, which `swap_tensors` replaces.
    version: MemoryVersion | tuple[int, int]
    owner: DTensorBase  # keeps its id, which is the key, from being reused


_shared: dict[tuple[int, Layout, torch.dtype | None], _Shared] = {}  # the dtype is that of the result, if it was cast
_deferred: dict[int, list[_Deferral]] | None = None
_after_deferral: list[Callable[[bool], None]] = []  # called with whether the deferred gradients are reduced
_reducing_now = False  # inside torch.autograd.grad, which returns its gradients immediately


class _Deferral(NamedTuple):
    parameter: DTensorBase
    layout: Layout  # of the gradient as it accumulates
    gradient: list[Tensor]  # one tensor, replaced as gradients accumulate


def prepare_operand(tensor: DTensorBase, source: Layout, target: Layout, shares: bool = False) -> Tensor:
    """Redistribute an operand for its operator; the result is shared if it is a parameter that becomes Entered.

    With `shares=True`, which asserts that the operator's results have other memory, activations are shared as well. A
    parameter that belongs to a unit is gathered by it.
    """
    gathered = gathered_by_unit(tensor, source, target)
    if gathered is not None:
        return gathered
    if not (tensor.requires_grad and torch.is_grad_enabled() and tensor.is_leaf and ENTERED in target.placements):
        return (redistribute_shared if shares else redistribute_local)(tensor, source, target)
    if is_capturing():
        return capture_call(prepare_operand, tensor, source, target)  # type: ignore[no-any-return]  # it is this function's
    return _enter(tensor, source, target, None)


def prepare_cast_operand(tensor: DTensorBase, source: Layout, target: Layout, dtype: torch.dtype) -> Tensor:
    """Cast a parameter, or a value computed from parameters alone, to the dtype of its use; redistribute it as `dtype`.

    Its gradient is reduced in its own dtype.
    """
    if is_capturing():
        return capture_call(prepare_cast_operand, tensor, source, target, dtype)  # type: ignore[no-any-return]  # likewise
    prepared = gathered_by_unit(tensor, source, target)
    if prepared is None:
        sent: torch.dtype = tensor._use.dtype
        if tensor.requires_grad and torch.is_grad_enabled() and tensor.is_leaf:
            prepared = _enter(tensor, source, target, sent)
        else:
            prepared = cast_and_redistribute(tensor, source, target, sent, tensor.dtype)
    return prepared.to(dtype)


def _enter(tensor: DTensorBase, source: Layout, target: Layout, dtype: torch.dtype | None) -> Tensor:
    """Redistribute a parameter, cast to `dtype` if given, and share the result between its uses."""
    if is_traced() and _saving_is_hooked():
        # Selective checkpointing expects the same operators in forward and in recomputation.
        return EnterParameter.apply(tensor, source, target, dtype)  # type: ignore[no-untyped-call, no-any-return]  # as below
    key = (id(tensor), target, dtype)
    known = _shared.get(key)
    if known is not None and known.owner is tensor and _is_unwritten(tensor, known.version):
        return known.result
    result: Tensor = EnterParameter.apply(tensor, source, target, dtype)  # type: ignore[no-untyped-call]  # torch's is untyped
    own_memory = dtype not in (None, tensor.dtype) or needs_redistribution(source, without_entered(target))
    if own_memory and _saving_is_hooked():
        return result
    if len(_shared) >= MAX_ENTERED:
        _shared.clear()
    version = memory_version(tensor) if own_memory else (tensor._version, tensor._cdata)
    _shared[key] = _Shared(result, version, tensor)
    return result


def _is_unwritten(tensor: DTensorBase, before: MemoryVersion | tuple[int, int]) -> bool:
    if isinstance(before, MemoryVersion):
        return not was_written(tensor, before)
    return before == (tensor._version, tensor._cdata)


def _saving_is_hooked() -> bool:
    return torch._C._autograd._top_saved_tensors_default_hooks(True) is not None


def forget_entered() -> None:
    """Drop the shared results, because the step is over or a tensor got other memory."""
    _shared.clear()
    if results_by_tensor:
        forget_shared()


@contextmanager
def reduce_immediately() -> Iterator[None]:
    """Reduce gradients inside the context immediately, even if reduction is deferred, because they are returned."""
    global _reducing_now
    before, _reducing_now = _reducing_now, True
    try:
        yield
    finally:
        _reducing_now = before


class EnterParameter(torch.autograd.Function):
    """Redistribute a parameter for an operator; backward reduces its gradient, now or when deferral ends."""

    @staticmethod
    def forward(ctx: Any, parameter: DTensorBase, source: Layout, target: Layout, dtype: torch.dtype | None) -> Tensor:
        ctx.parameter, ctx.source, ctx.target, ctx.version = parameter, source, target, None
        with torch.no_grad():
            cast = parameter if dtype is None else parameter.to(dtype)
            moved = redistribute_local(cast, source, target)
        if cast is not parameter or needs_redistribution(source, without_entered(target)):  # it has memory of its own
            ctx.version = memory_version(parameter)
        return moved.view_as(moved) if moved is parameter else moved

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, None, None, None]:
        torch.autograd.Variable._execution_engine.queue_callback(forget_entered)
        if ctx.version is not None:
            refuse_aliased_write(ctx.parameter, ctx.version)
        gradient = gradient.to(ctx.parameter.dtype)
        if _deferred is not None and not (_reducing_now or torch.is_grad_enabled() or _has_hooks(ctx.parameter)):
            _defer(ctx.parameter, dual(ctx.target), gradient)
            return None, None, None, None
        refuse_lost_graph(gradient, dual(ctx.target), dual(ctx.source))
        return redistribute_local(gradient, dual(ctx.target), dual(ctx.source)), None, None, None


def _has_hooks(parameter: DTensorBase) -> bool:
    """Return whether the parameter has gradient hooks, for which its gradient is reduced immediately."""
    with no_torch_function():
        return bool(parameter._backward_hooks) or bool(getattr(parameter, "_post_accumulate_grad_hooks", None))


@contextmanager
def defer_gradient_reduction() -> Iterator[None]:
    """Accumulate the gradients of parameters over several backward passes, and reduce them once, at the end.

    Inside the context, gradients that need a reduction are kept unreduced: `.grad` has them only after it ends. The
    gradients of parameters with gradient hooks, and those of `torch.autograd.grad`, are reduced immediately.

    >>> import shardwright as sw
    >>> with sw.defer_gradient_reduction():
    ...     pass  # several micro-batches: forward, backward
    """
    global _deferred
    if _deferred is not None:  # the outermost context reduces
        yield
        return
    _deferred, completed = {}, False
    try:
        yield
        pending = [deferral for deferrals in _deferred.values() for deferral in deferrals]
        completed = True
    finally:
        _deferred = None
        callbacks = list(_after_deferral)
        _after_deferral.clear()
        for callback in callbacks:
            callback(completed)
    with no_torch_function(), torch.no_grad():
        for deferral in pending:
            layout = without_entered(dual(deferral.parameter._layout))
            reduced = redistribute_local(deferral.gradient[0], deferral.layout, layout)
            if deferral.parameter.grad is None:
                deferral.parameter.grad = tag(reduced.detach(), layout)
            else:
                deferral.parameter.grad += reduced


def is_deferring() -> bool:
    """Return whether the reduction of gradients is deferred."""
    return _deferred is not None


def call_after_deferral(callback: Callable[[bool], None]) -> None:
    """Call back when the deferral that is active ends: with True to reduce gradients, with False to drop them."""
    _after_deferral.append(callback)


def _defer(parameter: DTensorBase, layout: Layout, gradient: Tensor) -> None:
    assert _deferred is not None
    deferrals = _deferred.setdefault(id(parameter), [])
    for deferral in deferrals:
        if deferral.layout is layout:
            deferral.gradient[0] = deferral.gradient[0] + gradient
            return
    deferrals.append(_Deferral(parameter, layout, [gradient.clone()]))
