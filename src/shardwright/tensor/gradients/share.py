"""Redistribute an activation once for all operators that need it under one layout, as long as its value stays the same.

The query, key and value projections of an attention all need their input gathered, or entered: one redistribution
serves them, and in backward autograd adds their gradients before the single reduction.

A result is kept by the tensor object it was made from, and reused only if the tensor was not written to since. It is
dropped, whichever comes first,

- with the tensor;
- at the end of a backward pass;
- when the saved-tensor hooks end that were active when it was made: activation checkpointing is meant to free it;
- if it needs no gradient, so that nothing else keeps it: when a few others have been made after it.

All ranks must take the same decision, or they would wait for each other. Each of these depends on what the program
does, never on memory, or on when Python frees an object.
"""

from __future__ import annotations

import threading
from collections import deque
from typing import Any, NamedTuple, TypeAlias
from weakref import ref

import torch
from torch import Tensor

from shardwright.errors import UnsupportedError
from shardwright.layout import Layout, Ragged, Shard
from shardwright.tensor.base import trace
from shardwright.tensor.base.capture import is_capturing
from shardwright.tensor.base.custom_op import is_recorded
from shardwright.tensor.base.gradient_types import ENTERED, REPLICATE, dual, without_entered
from shardwright.tensor.base.tagging import DTensorBase, no_torch_function, tag
from shardwright.tensor.base.writes import MemoryVersion, memory_version, was_written
from shardwright.tensor.redistribute.autograd import needs_redistribution, redistribute_local, refuse_lost_graph

__all__ = [
    "enter_hooks",
    "exit_hooks",
    "forget_shared",
    "gather_for_operators",
    "redistribute_shared",
    "results_by_tensor",
    "watch_gradient",
]

MAX_WITHOUT_GRADIENT = 4
_PRUNED_AT = 1024

_Key: TypeAlias = tuple[Layout, Layout, bool]  # source, target, whether a gradient is recorded


class _Result(NamedTuple):
    local: Tensor
    version: int  # of the result itself: an operator may have written to it
    made_from: int | MemoryVersion  # the version of the tensor; of its memory, if the result has memory of its own

    def is_intact(self) -> bool:
        """Return whether no operator has written to the result, or returned it as its own, which makes it a DTensor."""
        return type(self.local) is Tensor and self.local._version == self.version


class _Shared:
    """The results made from one tensor, which has them as `_shared`; everything else refers to them weakly."""

    __slots__ = ("__weakref__", "bypasses", "context", "results")

    def __init__(self, context: Any) -> None:
        self.context, self.results = context, dict[_Key, _Result]()
        self.bypasses: bool | None = None  # set by `gather_for_operators`: whether a result was used


class _Scopes(threading.local):
    """The scopes of saved-tensor hooks in this thread, innermost last: what was shared in each."""

    def __init__(self) -> None:
        self.open: list[list[ref[_Shared]]] = []


_scopes = _Scopes()
results_by_tensor: list[ref[_Shared]] = []  # of every tensor that has any
_without_gradient: deque[tuple[ref[_Shared], _Key]] = deque()


def redistribute_shared(tensor: DTensorBase, source: Layout, target: Layout) -> Tensor:
    """Return the local tensor under `target`, as `redistribute_local` does; others use it, too: do not write to it."""
    records = tensor.requires_grad and torch.is_grad_enabled()
    if not _is_sharable(tensor, source, records):
        return redistribute_local(tensor, source, target)
    context = _context()
    shared: _Shared | None = tensor.__dict__.get("_shared")
    if shared is None or shared.context[0] is not context[0] or shared.context[1] != context[1]:
        shared = _Shared(context)
    key = source, target, records
    known = shared.results.get(key)
    if known is not None and known.is_intact() and _is_unwritten(tensor, known.made_from):
        if shared.bypasses is False:
            shared.bypasses = True
        return known.local
    local = redistribute_local(tensor, source, target)
    if local is tensor:
        return local
    own_memory = needs_redistribution(source, without_entered(target))
    shared.results[key] = _Result(local, local._version, memory_version(tensor) if own_memory else tensor._version)
    _keep(tensor, shared, key, records)
    return local


def gather_for_operators(tensor: Any, target: Layout) -> Any:
    """Return an activation redistributed to `target`, for a module whose operators will enter it.

    Operators that use a replicated value differently on each rank have partial gradients. Where `target` replicates
    what was sharded, these are reduce-scattered to the shards at once: their sum is not needed on every rank.
    """
    source = tensor._layout
    entered = [
        ENTERED if isinstance(before, Shard | Ragged) and after == REPLICATE else after
        for before, after in zip(source.placements, target.placements, strict=True)
    ]
    records = tensor.requires_grad and torch.is_grad_enabled()
    if not records or is_capturing() or is_recorded() or ENTERED not in entered:
        return tensor.redistribute(placements=target.placements)
    with no_torch_function(), trace.requested():
        layout = target.replace(placements=entered, order=target.order)
        local = redistribute_local(tensor, source, layout)
        value: Tensor = _ValueOfGathered.apply(tensor, local.detach(), source, target)  # type: ignore[no-untyped-call]  # torch's is untyped
        result = tag(value, target)
        shared = _Shared(_context())
        shared.bypasses = False
        shared.results[target, layout, True] = _Result(local, local._version, value._version)
        _keep(result, shared, (target, layout, True), records=True)
    return result


def watch_gradient(tensor: DTensorBase) -> None:
    """Let all gradients of a tensor pass through it from now on, because a hook or the caller wants them.

    Raise UnsupportedError if gradients of operators that have used it already do not: see `gather_for_operators`.
    """
    shared: _Shared | None = tensor.__dict__.get("_shared")
    if shared is None or shared.bypasses is None:
        return
    if shared.bypasses:
        raise UnsupportedError(
            f"the gradient of {tensor._layout}, the gathered input of a module, was asked for after operators had used "
            "it, and these reduce their gradients directly to its shards: register the hook, or call retain_grad, "
            "before the first use, or ask for the gradient of the module's input before it is gathered"
        )
    shared.bypasses = None
    shared.results.clear()


class _ValueOfGathered(torch.autograd.Function):
    """The value of a tensor that was gathered: `value`, whose memory it shares. Its gradient is replicated."""

    @staticmethod
    def forward(ctx: Any, _: Tensor, value: Tensor, source: Layout, target: Layout) -> Tensor:
        ctx.source, ctx.target = source, target
        return value.detach()  # with its version counter: a write to one is a write to the other

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None, None]:
        refuse_lost_graph(gradient, dual(ctx.target), dual(ctx.source))
        return redistribute_local(gradient, dual(ctx.target), dual(ctx.source)), None, None, None


def _context() -> tuple[Any, bool]:
    return _scopes.open[-1] if _scopes.open else None, is_capturing()


def _is_sharable(tensor: DTensorBase, source: Layout, records: bool) -> bool:
    if tensor.is_inference() or torch.is_inference_mode_enabled():
        return False  # it, or the result, has no version counter
    if is_recorded() and not is_capturing():
        return False  # an earlier result would be a constant of the graph
    if records:
        return not tensor.is_leaf  # its result refers to it by the graph: they would keep each other
    # Results of frozen parameters would stay for long, and those of a replicated tensor are slices of its own memory.
    return not ("_is_param" in tensor.__dict__ or "_use" in tensor.__dict__ or source.is_replicated)


def _is_unwritten(tensor: DTensorBase, before: int | MemoryVersion) -> bool:
    return tensor._version == before if isinstance(before, int) else not was_written(tensor, before)


def _keep(tensor: DTensorBase, shared: _Shared, key: _Key, records: bool) -> None:
    """Attach the results to their tensor, and note what they have to be dropped with."""
    reference = ref(shared)
    if tensor.__dict__.get("_shared") is not shared:
        tensor.__dict__["_shared"] = shared
        if _scopes.open:
            _scopes.open[-1].append(reference)
        if len(results_by_tensor) % _PRUNED_AT == _PRUNED_AT - 1:
            results_by_tensor[:] = [other for other in results_by_tensor if other() is not None]
        results_by_tensor.append(reference)
    if not records:
        _without_gradient.append((reference, key))
        if len(_without_gradient) > MAX_WITHOUT_GRADIENT:
            oldest, at = _without_gradient.popleft()
            holder = oldest()
            if holder is not None:
                holder.results.pop(at, None)


def forget_shared() -> None:
    """Drop all results, because a backward pass is over or a tensor got other memory."""
    _drop(results_by_tensor)
    _without_gradient.clear()


def _drop(shared: list[ref[_Shared]]) -> None:
    for reference in shared:
        holder = reference()
        if holder is not None:
            holder.results.clear()
    shared.clear()


def enter_hooks() -> None:
    """Begin a scope of saved-tensor hooks: results made in it are not used outside."""
    _scopes.open.append([])


def exit_hooks() -> None:
    """End the innermost scope, and drop the results made in it."""
    if _scopes.open:
        _drop(_scopes.open.pop())
