"""Running a plan: the local tensor goes in under one layout and comes out under the other.

A step is begun and, where ranks talk, finished later: what it returns is a function that waits and gives the result.
Only the last collective of a plan is left under way; whatever comes before it is waited for.
"""

from __future__ import annotations

from typing import final

import torch
from torch import Tensor

from shardwright.errors import ArgumentTypeError, LayoutError
from shardwright.layout import Layout, Ragged, Shard
from shardwright.tensor.redistribute.collect import all_gather, all_reduce, reduce_scatter
from shardwright.tensor.redistribute.context import ExecutionContext, Finish
from shardwright.tensor.redistribute.exchange import exchange
from shardwright.tensor.redistribute.groups import Groups, WorldGroups
from shardwright.tensor.redistribute.identity import IDEMPOTENT, identity_element
from shardwright.tensor.redistribute.packing import bits
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
    """A redistribution under way: `wait()` gives the local tensor, the same one each time.

    Until then the tensor that was given belongs to it.

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
        """The local tensor, once it is there."""
        if self._finish is not None:
            self._result = self._finish()
            self._finish = None  # frees the input
        assert self._result is not None  # set by the first wait
        return self._result


def execute(plan: Plan, local: Tensor, groups: Groups = _WORLD) -> Tensor:
    """This rank's local tensor under the plan's target, given that under its source.

    It is contiguous and in memory of its own; where nothing changes on this rank (no step, or it keeps all it has as
    its addend), it is the tensor that was given. All ranks of the two meshes take part; a rank outside a mesh has
    an empty tensor for it, see `local_shape`. No gradient flows: call it with plain tensors.

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
    """`execute`, under way: the plan's last collective runs while you do something else.

    >>> from shardwright.layout import Mesh
    >>> from shardwright.tensor.redistribute import plan
    >>> rows = Layout(Mesh((1,)), [Shard(0)], (2,))
    >>> start(plan(rows, rows, itemsize=4), torch.ones(2)).wait()
    tensor([1., 1.])
    """
    seat = ExecutionContext(plan, groups.rank, groups)
    if seat.rank not in plan.source.mesh:
        # Outside the mesh there is nothing to give. A tensor without dimensions has an element even there.
        local = local.new_empty(local_shape(plan.source, seat.rank))
    _check(plan, local, seat.rank)
    steps = [step for step in plan.steps if seat.rank in step.before.mesh or seat.rank in step.after.mesh]
    if not steps:
        return PendingRedistribution(lambda: local)
    given = now = local.detach().resolve_conj().resolve_neg()
    last = max((number for number, step in enumerate(steps) if step.communicates), default=-1)
    for step in steps[:last]:
        now = _begin(step, now, seat, owned=not _shares(now, local))()
    talk = _begin(steps[last], now, seat, owned=not _shares(now, local)) if last >= 0 else None

    def finish() -> Tensor:
        result = given if talk is None else talk()
        for step in steps[last + 1 :]:
            result = _begin(step, result, seat, owned=not _shares(result, local))()
        if result is given:
            return local
        return result.clone(memory_format=torch.contiguous_format) if _shares(result, local) else result.contiguous()

    return PendingRedistribution(finish)


def local_shape(layout: Layout, rank: int) -> tuple[int, ...]:
    """The shape of a rank's local tensor; outside the mesh, that of an empty one with as many dimensions (at least 1).

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
            "give the shard that the source layout describes"
        )
    if local.itemsize != plan.itemsize:
        raise ArgumentTypeError(
            f"the local tensor of rank {rank} is {local.dtype}, {local.itemsize} bytes per element, "
            f"but the plan was made for {plan.itemsize}: plan with itemsize={local.itemsize}"
        )


def _begin(step: Step, local: Tensor, seat: ExecutionContext, *, owned: bool) -> Finish:
    """Begins a step; `owned` says that its input is not the caller's, and may be written over."""
    match step:
        case AllGather():
            return all_gather(step, local, seat)
        case ReduceScatter():
            return reduce_scatter(step, local, seat)
        case AllReduce():
            return all_reduce(step, local, seat, owned=owned)
        case AllToAll() | Exchange():
            return exchange(step, local, seat)
    with torch.no_grad():
        match step:
            case Slice():
                result = _slice(step, local, seat.rank)
            case Scale():
                result = _times(local, float(step.factor), in_place=owned)
            case ToPartial():
                result = _to_partial(step, local, seat.rank)
            case _:
                raise ArgumentTypeError(f"{step!r} is a {type(step).__name__}: not a step that can be run")
    return lambda: result


def _slice(step: Slice, local: Tensor, rank: int) -> Tensor:
    """The part, as a view."""
    if rank not in step.after.mesh:
        return local.new_empty(local_shape(step.after, rank))
    part = step.after.region(rank)
    if part.is_empty:
        return local.new_empty(part.size)
    return local[part.slices(step.before.region(rank))]


def _times(local: Tensor, factor: float, *, in_place: bool) -> Tensor:
    if not (local.dtype.is_floating_point or local.dtype.is_complex):
        raise ArgumentTypeError(f"an average of {local.dtype} needs a float or complex dtype: convert it first")
    if local.itemsize == 1 or local.dtype == torch.complex32:  # these have no arithmetic of their own
        wider = torch.complex64 if local.dtype.is_complex else torch.float32
        return local.to(wider).mul_(factor).to(local.dtype)
    return local.mul_(factor) if in_place else local * factor


def _to_partial(step: ToPartial, local: Tensor, rank: int) -> Tensor:
    if rank not in step.after.mesh:
        return local
    if not isinstance(step.before.placements[step.mesh_dim], Shard | Ragged):
        if step.op in IDEMPOTENT or step.after.mesh.coordinate(rank)[step.mesh_dim] == 0:
            return local
        return torch.full_like(local, identity_element(local.dtype, step.op), memory_format=torch.contiguous_format)
    whole, part = step.after.region(rank), step.before.region(rank)
    out = local.new_empty(whole.size).fill_(identity_element(local.dtype, step.op))
    if step.op == "avg":
        local = _times(local, step.after.mesh.shape[step.mesh_dim], in_place=False)
    if not part.is_empty:
        bits(out)[part.slices(whole)] = bits(local)
    return out


def _shares(tensor: Tensor, local: Tensor) -> bool:
    """Whether the two lie in the same memory."""
    return tensor.untyped_storage().data_ptr() == local.untyped_storage().data_ptr()
