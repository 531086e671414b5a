"""Exchange parts of matrices between requesting ranks and the owners of shards, in both directions.

Every rank has its own matrix, parts of which belong to slots of other ranks; a slot is a stack of the parts of all
ranks. `spread` sends the parts to the slots; `deliver` sends the contents of the slots back and sums them. Each is the
transpose of the other, hence its backward, and both can be differentiated any number of times.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, NamedTuple, final

import torch
from torch import Tensor

from shardwright import comm

__all__ = ["Part", "Route", "Slot", "deliver", "merge_intervals", "spread"]


class Part(NamedTuple):
    """Rows `start:stop` and columns `first:last` of this rank's matrix, which belong to a slot of `peer`."""

    peer: int
    start: int
    stop: int
    first: int
    last: int


class Slot(NamedTuple):
    """A stack on this rank: `counts[peer]` rows for each peer, in the order of peers, with `width` columns."""

    width: int
    counts: Sequence[int]


@final
@dataclass(frozen=True, eq=False)
class Route:
    """This rank's view of which parts of the ranks' matrices belong to which slots.

    No part is empty. The parts for one peer are in the order of that peer's slots. Peers are indices in the group.
    `what` is used in error messages.

    >>> route = Route(comm.world(), 2, 3, [Part(0, 0, 2, 0, 2), Part(0, 0, 2, 1, 3)], [Slot(2, [2]), Slot(2, [2])])
    >>> stacks, _ = spread(route, torch.arange(6.0).view(2, 3))
    >>> stacks
    [tensor([[0., 1.],
            [3., 4.]]), tensor([[1., 2.],
            [4., 5.]])]
    >>> deliver(route, stacks, torch.empty(0))
    tensor([[0., 2., 2.],
            [3., 8., 5.]])
    """

    group: comm.Group
    rows: int
    columns: int
    parts: Sequence[Part]
    slots: Sequence[Slot]
    what: str = "an operator of a ShardedTensor"

    def synchronise(self) -> None:
        """Wait for all ranks before a backward exchange; a missing rank is reported."""
        comm.gather_bytes(b"", self.group, what=f"backward of {self.what}")

    @property
    def overlaps(self) -> bool:
        """True unless the parts tile the matrix: then they can be copied instead of summed."""
        area = sum((part.stop - part.start) * (part.last - part.first) for part in self.parts)
        return area != self.rows * self.columns

    def matrix_views(self, matrix: Tensor) -> dict[int, list[Tensor]]:
        """Return views of this rank's parts of the matrix, by peer."""
        views: dict[int, list[Tensor]] = {}
        for peer, start, stop, first, last in self.parts:
            views.setdefault(peer, []).append(matrix[start:stop, first:last])
        return views

    def slot_views(self, stacks: Sequence[Tensor]) -> dict[int, list[Tensor]]:
        """Return views of this rank's slots, by the peer that they belong to."""
        views: dict[int, list[Tensor]] = {}
        for slot, stack in zip(self.slots, stacks, strict=True):
            ends = accumulate(slot.counts)
            for peer, (end, count) in enumerate(zip(ends, slot.counts, strict=True)):
                if count and slot.width:
                    views.setdefault(peer, []).append(stack[end - count : end])
        return views


def spread(
    route: Route, matrix: Tensor, *, differentiable: bool = False, anchor: Tensor | None = None
) -> tuple[list[Tensor], Tensor]:
    """Return the stacks of this rank's slots, filled from all ranks' matrices; and an anchor.

    `differentiable` must be the same on all ranks: each takes part in backward, whether or not its own matrix requires
    grad. The anchor, an empty tensor, connects a rank without slots to backward: pass it to whatever uses the stacks.
    """
    if not (differentiable and torch.is_grad_enabled()):
        return list(_spread(route, matrix)), matrix.new_empty(0)
    anchor = _new_anchor(matrix) if anchor is None else anchor
    end, *stacks = _Spread.apply(route, anchor, matrix)  # type: ignore[no-untyped-call]  # torch's stubs lack it
    return stacks, end


def deliver(
    route: Route, stacks: Sequence[Tensor], like: Tensor, *, differentiable: bool = False, anchor: Tensor | None = None
) -> Tensor:
    """Return this rank's matrix: the sum of its parts in all ranks' slots, with dtype and device of `like`.

    `differentiable` must be the same on all ranks, as for `spread`.
    """
    if not (differentiable and torch.is_grad_enabled()):
        return _deliver(route, stacks, like)
    anchor = _new_anchor(like) if anchor is None else anchor
    result: Tensor = _Deliver.apply(route, like, anchor, *stacks)  # type: ignore[no-untyped-call]  # likewise
    return result


def merge_intervals(intervals: Iterable[tuple[int, int]]) -> list[tuple[int, int]]:
    """Return the union of these intervals as the fewest disjoint ones, ascending, without empty ones.

    >>> merge_intervals([(4, 6), (0, 2), (5, 9), (2, 3), (7, 7)])
    [(0, 3), (4, 9)]
    """
    result: list[tuple[int, int]] = []
    for start, stop in sorted(interval for interval in intervals if interval[0] < interval[1]):
        if result and start <= result[-1][1]:
            result[-1] = (result[-1][0], max(stop, result[-1][1]))
        else:
            result.append((start, stop))
    return result


def _new_anchor(like: Tensor) -> Tensor:
    """Return an empty leaf that requires grad, so that the rank takes part in backward in any case."""
    return torch.empty(0, device=like.device, requires_grad=True)


def _spread(route: Route, matrix: Tensor) -> tuple[Tensor, ...]:
    stacks = tuple(matrix.new_empty(sum(slot.counts), slot.width) for slot in route.slots)
    _exchange(route.matrix_views(matrix), route.slot_views(stacks), route.group, add=False)
    return stacks


def _deliver(route: Route, stacks: Sequence[Tensor], like: Tensor) -> Tensor:
    add = route.overlaps
    matrix = (like.new_zeros if add else like.new_empty)(route.rows, route.columns)
    _exchange(route.slot_views(stacks), route.matrix_views(matrix), route.group, add=add)
    return matrix


def _exchange(
    sends: dict[int, list[Tensor]], receives: dict[int, list[Tensor]], group: comm.Group, *, add: bool
) -> None:
    """Send tensors to peers, and copy or add what they send; local parts are copied."""
    with torch.no_grad():
        packed = {peer: _packed(tensors) for peer, tensors in sends.items() if peer != group.rank}
        buffers = {peer: _buffer(targets, add) for peer, targets in receives.items() if peer != group.rank}
        comm.exchange(packed, buffers, group)
        for peer in sorted(receives):  # sum in the same order on every rank
            targets = receives[peer]
            if peer == group.rank:
                parts: Sequence[Tensor] = sends[peer]
            elif _received_in_place(targets, add):
                continue
            else:
                parts = torch.split(buffers[peer], [target.numel() for target in targets])
            for target, part in zip(targets, parts, strict=True):
                target.add_(part.view(target.shape)) if add else target.copy_(part.view(target.shape))


def _packed(tensors: Sequence[Tensor]) -> Tensor:
    flat = [tensor.reshape(-1) for tensor in tensors]
    return flat[0] if len(flat) == 1 else torch.cat(flat)


def _buffer(targets: Sequence[Tensor], add: bool) -> Tensor:
    if _received_in_place(targets, add):
        return targets[0].view(-1)
    return targets[0].new_empty(sum(target.numel() for target in targets))


def _received_in_place(targets: Sequence[Tensor], add: bool) -> bool:
    return len(targets) == 1 and targets[0].is_contiguous() and not add


class _Spread(torch.autograd.Function):
    """`spread`, with `deliver` as its backward."""

    @staticmethod
    def forward(ctx: Any, route: Route, anchor: Tensor, matrix: Tensor) -> tuple[Tensor, ...]:
        ctx.route, ctx.like = route, matrix.new_empty(0)
        return anchor.new_empty(0), *_spread(route, matrix)

    @staticmethod
    def backward(ctx: Any, end: Tensor, *gradients: Tensor) -> Any:
        anchor = end if end.requires_grad else None
        ctx.route.synchronise()
        return None, None, deliver(ctx.route, gradients, ctx.like, differentiable=True, anchor=anchor)


class _Deliver(torch.autograd.Function):
    """`deliver`, with `spread` as its backward."""

    @staticmethod
    def forward(ctx: Any, route: Route, like: Tensor, _: Tensor, *stacks: Tensor) -> Tensor:
        ctx.route = route
        return _deliver(route, stacks, like)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        ctx.route.synchronise()
        stacks, end = spread(ctx.route, gradient, differentiable=True)
        # The anchor's empty gradient connects a rank without slots to a second backward.
        return None, None, end, *stacks
