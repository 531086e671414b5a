"""Carrying parts of a matrix between the ranks that ask and the ranks that answer, in both directions.

Every rank has a matrix of its own, and parts of it belong to other ranks' slots: a slot is a stack of what all ranks
have for it. `spread` takes the parts to the slots; `deliver` takes what lies in the slots back and adds it up. Each is
the other's transpose, so each is the other's backward, and both can be differentiated any number of times.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, NamedTuple, final

import torch
from torch import Tensor

from shardwright import comm

__all__ = ["Part", "Route", "Slot", "deliver", "merged", "spread"]


class Part(NamedTuple):
    """Rows `start:stop` and columns `first:last` of this rank's matrix, which belong to a slot of `peer`."""

    peer: int
    start: int
    stop: int
    first: int
    last: int


class Slot(NamedTuple):
    """A stack on this rank: `counts[peer]` rows for each peer, one peer after the other, `width` columns each."""

    width: int
    counts: Sequence[int]


@final
@dataclass(frozen=True, eq=False)
class Route:
    """Which parts of the ranks' matrices belong to which slots, as one rank of the group sees it.

    No part is empty. The parts that a rank has for one peer come in the order of that peer's slots. Peers are indices
    in the group. `what` names whose route it is, for errors.

    >>> both = Route(comm.world(), 2, 3, [Part(0, 0, 2, 0, 2), Part(0, 0, 2, 1, 3)], [Slot(2, [2]), Slot(2, [2])])
    >>> stacks, _ = spread(both, torch.arange(6.0).view(2, 3))
    >>> stacks
    [tensor([[0., 1.],
            [3., 4.]]), tensor([[1., 2.],
            [4., 5.]])]
    >>> deliver(both, stacks, torch.empty(0))
    tensor([[0., 2., 2.],
            [3., 8., 5.]])
    """

    group: comm.Group
    rows: int
    columns: int
    parts: Sequence[Part]
    slots: Sequence[Slot]
    what: str = "an operator of a ShardedTensor"

    def meet(self) -> None:
        """Waits for all ranks before they go back along the route; one that does not come is named."""
        comm.gather_bytes(b"", self.group, what=f"backward of {self.what}")

    @property
    def overlaps(self) -> bool:
        """Whether the parts overlap or leave something out, so that their sum is not just each in its place."""
        area = sum((part.stop - part.start) * (part.last - part.first) for part in self.parts)
        return area != self.rows * self.columns

    def at_the_asker(self, matrix: Tensor) -> dict[int, list[Tensor]]:
        """This rank's parts of the matrix, as views, by peer."""
        found: dict[int, list[Tensor]] = {}
        for peer, start, stop, first, last in self.parts:
            found.setdefault(peer, []).append(matrix[start:stop, first:last])
        return found

    def at_the_answerer(self, stacks: Sequence[Tensor]) -> dict[int, list[Tensor]]:
        """What lies in this rank's slots, as views, by the peer whose it is."""
        found: dict[int, list[Tensor]] = {}
        for slot, stack in zip(self.slots, stacks, strict=True):
            ends = accumulate(slot.counts)
            for peer, (end, count) in enumerate(zip(ends, slot.counts, strict=True)):
                if count and slot.width:
                    found.setdefault(peer, []).append(stack[end - count : end])
        return found


def spread(
    route: Route, matrix: Tensor, *, differentiable: bool = False, anchor: Tensor | None = None
) -> tuple[list[Tensor], Tensor]:
    """The stacks of this rank's slots, filled with the parts of all ranks' matrices; and an anchor.

    `differentiable` is said alike on all ranks: each takes part in the way back, whether or not its own matrix needs a
    gradient. The anchor, an empty tensor, ties a rank without slots to it: give it to whatever uses the stacks.
    """
    if not (differentiable and torch.is_grad_enabled()):
        return list(_spread(route, matrix)), matrix.new_empty(0)
    anchor = _new_anchor(matrix) if anchor is None else anchor
    end, *stacks = _Spread.apply(route, anchor, matrix)  # type: ignore[no-untyped-call]  # torch's stubs lack it
    return stacks, end


def deliver(
    route: Route, stacks: Sequence[Tensor], like: Tensor, *, differentiable: bool = False, anchor: Tensor | None = None
) -> Tensor:
    """This rank's matrix: the sum of what lies for it in all ranks' slots; `like` says its dtype and device.

    `differentiable` is said alike on all ranks, as for `spread`.
    """
    if not (differentiable and torch.is_grad_enabled()):
        return _deliver(route, stacks, like)
    anchor = _new_anchor(like) if anchor is None else anchor
    made: Tensor = _Deliver.apply(route, like, anchor, *stacks)  # type: ignore[no-untyped-call]  # likewise
    return made


def merged(intervals: Iterable[tuple[int, int]]) -> list[tuple[int, int]]:
    """The union of these intervals, as few as possible, ascending; empty ones vanish.

    >>> merged([(4, 6), (0, 2), (5, 9), (2, 3), (7, 7)])
    [(0, 3), (4, 9)]
    """
    found: list[tuple[int, int]] = []
    for start, stop in sorted(interval for interval in intervals if interval[0] < interval[1]):
        if found and start <= found[-1][1]:
            found[-1] = (found[-1][0], max(stop, found[-1][1]))
        else:
            found.append((start, stop))
    return found


def _new_anchor(like: Tensor) -> Tensor:
    """An empty leaf that needs a gradient, so that a rank takes part in the way back even if nothing else does."""
    return torch.empty(0, device=like.device, requires_grad=True)


def _spread(route: Route, matrix: Tensor) -> tuple[Tensor, ...]:
    stacks = tuple(matrix.new_empty(sum(slot.counts), slot.width) for slot in route.slots)
    _carry(route.at_the_asker(matrix), route.at_the_answerer(stacks), route.group, add=False)
    return stacks


def _deliver(route: Route, stacks: Sequence[Tensor], like: Tensor) -> Tensor:
    add = route.overlaps
    matrix = (like.new_zeros if add else like.new_empty)(route.rows, route.columns)
    _carry(route.at_the_answerer(stacks), route.at_the_asker(matrix), route.group, add=add)
    return matrix


def _carry(going: dict[int, list[Tensor]], coming: dict[int, list[Tensor]], group: comm.Group, *, add: bool) -> None:
    """Sends these tensors and fills those, or adds to them; what is one's own is copied."""
    with torch.no_grad():
        sends = {peer: _packed(tensors) for peer, tensors in going.items() if peer != group.rank}
        landings = {peer: _landing(places, add) for peer, places in coming.items() if peer != group.rank}
        comm.exchange(sends, landings, group)
        for peer in sorted(coming):  # a sum is taken in one order, whoever takes it
            places = coming[peer]
            if peer == group.rank:
                parts: Sequence[Tensor] = going[peer]
            elif _lands_in_place(places, add):
                continue
            else:
                parts = torch.split(landings[peer], [place.numel() for place in places])
            for place, part in zip(places, parts, strict=True):
                place.add_(part.view(place.shape)) if add else place.copy_(part.view(place.shape))


def _packed(tensors: Sequence[Tensor]) -> Tensor:
    flat = [tensor.reshape(-1) for tensor in tensors]
    return flat[0] if len(flat) == 1 else torch.cat(flat)


def _landing(places: Sequence[Tensor], add: bool) -> Tensor:
    if _lands_in_place(places, add):
        return places[0].view(-1)
    return places[0].new_empty(sum(place.numel() for place in places))


def _lands_in_place(places: Sequence[Tensor], add: bool) -> bool:
    return len(places) == 1 and places[0].is_contiguous() and not add


class _Spread(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, route: Route, anchor: Tensor, matrix: Tensor) -> tuple[Tensor, ...]:
        ctx.route, ctx.like = route, matrix.new_empty(0)
        return anchor.new_empty(0), *_spread(route, matrix)

    @staticmethod
    def backward(ctx: Any, end: Tensor, *gradients: Tensor) -> Any:
        anchor = end if end.requires_grad else None
        ctx.route.meet()
        return None, None, deliver(ctx.route, gradients, ctx.like, differentiable=True, anchor=anchor)


class _Deliver(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, route: Route, like: Tensor, _: Tensor, *stacks: Tensor) -> Tensor:
        ctx.route = route
        return _deliver(route, stacks, like)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        ctx.route.meet()
        stacks, end = spread(ctx.route, gradient, differentiable=True)
        # The anchor's gradient is empty, and the way by which a rank without slots is part of a second backward.
        return None, None, end, *stacks
