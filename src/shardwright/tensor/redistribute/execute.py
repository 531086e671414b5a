"""Execute a plan: turn the local tensor under one layout into that under the other.

Starting a step returns a function that waits for it and returns the result. Only the last collective of a plan stays in
flight; the steps before it are waited for.
"""

from __future__ import annotations

from typing import final

import torch
from torch import Tensor

from shardwright.comm.packing import bits
from shardwright.errors import ArgumentTypeError, LayoutError
from shardwright.layout import Layout, Ragged, Shard
from shardwright.tensor.redistribute.collect import all_gather, all_reduce, reduce_scatter
from shardwright.tensor.redistribute.context import ExecutionContext, Finish
from shardwright.tensor.redistribute.exchange import exchange
from shardwright.tensor.redistribute.groups import Groups, WorldGroups
from shardwright.tensor.redistribute.identity import IDEMPOTENT, identity_element
from shardwright.tensor.redistribute.plan import Plan
from shardwright.tensor.redistribute.steps import (
    AllGather,
    AllReduce,
    AllToAll,
    Exchange,
    ReduceScatter,
    Scale,
    Slice,
    Step,
    ToPartial,
)

__all__ = ["PendingRedistribution", "execute", "local_shape", "start"]

_WORLD = WorldGroups()


@final
class PendingRedistribution:
    """A redistribution in flight: `wait()` returns the local tensor, the same object each time.

    Do not write to the input before that.

    >>> from shardwright.layout import Mesh, Replicate
    >>> from shardwright.tensor.redistribute import plan
    >>> rows, whole = (Layout(Mesh((1,)), [p], (2,)) for p in (Shard(0), Replicate()))
    >>> start(plan(rows, whole, itemsize=4), torch.ones(2)).wait()
    tensor([1., 1.])
    """

    __slots__ = ("_finish", "_result")

    def __init__(self, finish: Finish) -> None:
        self._finish: Finish | None = finish
        self._result: Tensor | None = None

    def wait(self) -> Tensor:
        """Wait for the result and return it."""
        if self._finish is not None:
            self._result = self._finish()
            self._finish = None  # frees the input
        assert self._result is not None  # set by the first wait
        return self._result


def execute(plan: Plan, local: Tensor, groups: Groups = _WORLD) -> Tensor:
    """Return this rank's local tensor under the plan's target, given the one under its source.

    The result is contiguous and does not share memory with the input, unless nothing changes on this rank (the plan has
    no steps, or its values become partial unchanged): then it is the input itself. Collective over the ranks of both
    meshes; a rank outside a mesh has an empty tensor for it, see `local_shape`. Not differentiable: pass plain tensors.

    >>> from shardwright.layout import Mesh, Replicate
    >>> from shardwright.tensor.redistribute import plan
    >>> rows, whole = (Layout(Mesh((1,)), [p], (2,)) for p in (Shard(0), Replicate()))
    >>> execute(plan(rows, whole, itemsize=4), torch.ones(2))
    tensor([1., 1.])
    >>> execute(plan(rows, whole, itemsize=4), torch.ones(3))
    Traceback (most recent call last):
    shardwright.errors.LayoutError: the local tensor of rank 0 has shape (3,), but [2] (0: S(0)) gives it (2,): ...
    """
    return start(plan, local, groups).wait()


def start(plan: Plan, local: Tensor, groups: Groups = _WORLD) -> PendingRedistribution:
    """Start `execute` and return at once: the last collective of the plan runs in the background.

    >>> from shardwright.layout import Mesh
    >>> from shardwright.tensor.redistribute import plan
    >>> rows = Layout(Mesh((1,)), [Shard(0)], (2,))
    >>> start(plan(rows, rows, itemsize=4), torch.ones(2)).wait()
    tensor([1., 1.])
    """
    context = ExecutionContext(plan, groups.rank, groups)
    if context.rank not in plan.source.mesh:
        # A rank outside the mesh contributes nothing, but a 0-dimensional tensor given there has an element.
        local = local.new_empty(local_shape(plan.source, context.rank))
    _check(plan, local, context.rank)
    steps = [step for step in plan.steps if context.rank in step.before.mesh or context.rank in step.after.mesh]
    if not steps:
        return PendingRedistribution(lambda: local)
    initial = current = local.detach().resolve_conj().resolve_neg()
    last = max((number for number, step in enumerate(steps) if step.communicates), default=-1)
    for step in steps[:last]:
        current = _start(step, current, context, owned=not _shares(current, local))()
    collective = _start(steps[last], current, context, owned=not _shares(current, local)) if last >= 0 else None

    def finish() -> Tensor:
        result = initial if collective is None else collective()
        for step in steps[last + 1 :]:
            result = _start(step, result, context, owned=not _shares(result, local))()
        if result is initial:
            return local
        return result.clone(memory_format=torch.contiguous_format) if _shares(result, local) else result.contiguous()

    return PendingRedistribution(finish)


def local_shape(layout: Layout, rank: int) -> tuple[int, ...]:
    """Return the shape of a rank's local tensor; outside the mesh, an empty shape with as many dimensions (at least 1).

    >>> from shardwright.layout import Mesh
    >>> rows = Layout(Mesh((2,)), [Shard(0)], (4, 6))
    >>> local_shape(rows, 1), local_shape(rows, 2)
    ((2, 6), (0, 0))
    """
    return layout.local_shape(rank) if rank in layout.mesh else (0,) * max(1, layout.ndim)


def _check(plan: Plan, local: Tensor, rank: int) -> None:
    expected = local_shape(plan.source, rank)
    if tuple(local.shape) != expected:
        raise LayoutError(
            f"the local tensor of rank {rank} has shape {tuple(local.shape)}, but {plan.source} gives it {expected}: "
            "pass the shard of the source layout"
        )
    if local.itemsize != plan.itemsize:
        raise ArgumentTypeError(
            f"the local tensor of rank {rank} is {local.dtype}, {local.itemsize} bytes per element, "
            f"but the plan was made for {plan.itemsize}: plan with itemsize={local.itemsize}"
        )


def _start(step: Step, local: Tensor, context: ExecutionContext, *, owned: bool) -> Finish:
    """Start a step; `owned` means that the input does not share memory with the caller's, and may be overwritten."""
    match step:
        case AllGather():
            return all_gather(step, local, context)
        case ReduceScatter():
            return reduce_scatter(step, local, context)
        case AllReduce():
            return all_reduce(step, local, context, owned=owned)
        case AllToAll() | Exchange():
            return exchange(step, local, context)
    with torch.no_grad():
        match step:
            case Slice():
                result = _slice(step, local, context.rank)
            case Scale():
                result = _scale(local, float(step.factor), in_place=owned)
            case ToPartial():
                result = _to_partial(step, local, context.rank)
            case _:
                raise ArgumentTypeError(f"cannot execute a step of type {type(step).__name__}: {step!r}")
    return lambda: result


def _slice(step: Slice, local: Tensor, rank: int) -> Tensor:
    """Return the slice as a view."""
    if rank not in step.after.mesh:
        return local.new_empty(local_shape(step.after, rank))
    part = step.after.region(rank)
    if part.is_empty:
        return local.new_empty(part.size)
    return local[part.slices(step.before.region(rank))]


def _scale(local: Tensor, factor: float, *, in_place: bool) -> Tensor:
    if not (local.dtype.is_floating_point or local.dtype.is_complex):
        raise ArgumentTypeError(
            f"Partial('avg') needs a floating or complex dtype, got {local.dtype}: convert it first"
        )
    if local.itemsize == 1 or local.dtype == torch.complex32:  # dtypes without arithmetic
        wider = torch.complex64 if local.dtype.is_complex else torch.float32
        return local.to(wider).mul_(factor).to(local.dtype)
    return local.mul_(factor) if in_place else local * factor


def _to_partial(step: ToPartial, local: Tensor, rank: int) -> Tensor:
    """Return partial values that reduce to the tensor: the identity element wherever another rank has the value."""
    if rank not in step.after.mesh:
        return local
    if not isinstance(step.before.placements[step.mesh_dim], Shard | Ragged):
        if step.op in IDEMPOTENT or step.after.mesh.coordinate(rank)[step.mesh_dim] == 0:
            return local
        return torch.full_like(local, identity_element(local.dtype, step.op), memory_format=torch.contiguous_format)
    target_region, part = step.after.region(rank), step.before.region(rank)
    out = local.new_empty(target_region.size).fill_(identity_element(local.dtype, step.op))
    if step.op == "avg":
        local = _scale(local, step.after.mesh.shape[step.mesh_dim], in_place=False)
    if not part.is_empty:
        bits(out)[part.slices(target_region)] = bits(local)
    return out


def _shares(tensor: Tensor, local: Tensor) -> bool:
    """Return whether the two share memory."""
    return tensor.untyped_storage().data_ptr() == local.untyped_storage().data_ptr()
