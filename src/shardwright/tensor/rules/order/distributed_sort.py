"""One long dimension, spread over ranks, in order: nothing is gathered.

Pieces are sorted where they are. Where each rank's share of the whole order begins is found by counting: a few
numbers a round, digit by digit. Then every element is sent once, to the rank it belongs to; or, where one element of
the order is wanted, none is.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate, pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor

from shardwright import comm
from shardwright.layout import Layout, Placement
from shardwright.tensor.base import policy, trace
from shardwright.tensor.base.gradient_types import REPLICATE, SUM
from shardwright.tensor.base.tagging import no_torch_function, tag
from shardwright.tensor.redistribute.implicit import completed
from shardwright.tensor.rules.shared.pieces import Pieces

__all__ = ["LONG", "can_be_ordered", "nth", "order_long"]

LONG = 4096  # elements: fewer are gathered sooner than their order is agreed on
DIGIT = 4  # bits found in a round
_FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
_ORDERED = (*_FLOATS, torch.int8, torch.int16, torch.int32, torch.int64, torch.uint8, torch.bool)


def can_be_ordered(dtype: torch.dtype) -> bool:
    """Whether its values have keys."""
    return dtype in _ORDERED


class _Line(NamedTuple):
    """The ranks that have the pieces: as a group, the piece of each of them, and this rank's."""

    group: comm.Group
    pieces: tuple[int, ...]
    mine: int


def _line(cut: Pieces) -> _Line:
    layout, here = cut.one_each, comm.rank()
    mesh = layout.mesh
    at = mesh.coordinate(here)
    kept = [m for m, placement in enumerate(layout.placements) if not placement.is_shard(cut.dim)]
    members = sorted(r for r in mesh.ranks if all(mesh.coordinate(r)[m] == at[m] for m in kept))
    group = comm.subgroup(members)
    return _Line(group, tuple(layout.region(r).offset[cut.dim] for r in group.ranks), cut.mine)


def _keys(values: Tensor, descending: bool) -> tuple[Tensor, int]:
    """Whole numbers in the order of the values, and how many bits they have. What is no number is the largest."""
    bits = 64 if values.dtype.itemsize == 8 else 32
    keys = values.long() if not values.is_floating_point() else values
    if values.is_floating_point():
        wide, whole = (torch.float64, torch.int64) if bits == 64 else (torch.float32, torch.int32)
        raw = (values.to(wide) + 0.0).view(whole)  # adding zero: the two zeros are equal
        keys = torch.where(raw < 0, raw ^ torch.iinfo(whole).max, raw)
        keys = torch.where(values.isnan(), torch.iinfo(whole).max, keys).long()
    return (~keys if descending else keys), bits


def _positions(keys: Tensor, bits: int, targets: Sequence[int], line: _Line) -> list[int]:
    """How many of these keys, which are sorted, come before each of these places in the order of all ranks' keys.

    Equal keys are in the order of their pieces.
    """
    wanted = torch.tensor(targets, device=keys.device)
    low = torch.full((len(targets),), -(1 << (bits - 1)), device=keys.device)
    steps = torch.arange(1, 1 << DIGIT, device=keys.device)
    for shift in range(bits - DIGIT, -1, -DIGIT):
        marks = low[:, None] + (steps << shift)
        below = comm.all_reduce(torch.searchsorted(keys, marks), line.group)
        low = low + ((below <= wanted[:, None]).sum(1) << shift)
    less = torch.searchsorted(keys, low)
    equal = torch.searchsorted(keys, low, right=True) - less
    seen = comm.all_gather(torch.stack([less, equal])[None], line.group)
    before = torch.tensor([piece < line.mine for piece in line.pieces], device=keys.device)
    left = wanted - seen[:, 0].sum(0) - seen[before, 1].sum(0)
    return (less + left.clamp(min=0).minimum(equal)).tolist()


def _deal(local: Tensor, sends: Sequence[int], receives: Sequence[int], line: _Line) -> Tensor:
    """Consecutive parts of a tensor, sent to the piece each is for; what came, in the order of the pieces."""
    parts = torch.split(local, list(sends))
    came = comm.all_to_all(
        [parts[piece].contiguous() for piece in line.pieces], [(receives[piece],) for piece in line.pieces], line.group
    )
    return torch.cat([came[line.pieces.index(piece)] for piece in range(len(line.pieces))])


class Deal(torch.autograd.Function):
    """`_deal`; gradients are dealt back."""

    @staticmethod
    def forward(ctx: Any, local: Tensor, sends: Sequence[int], receives: Sequence[int], line: _Line) -> Tensor:
        ctx.counts, ctx.line = (receives, sends), line
        return _deal(local, sends, receives, line)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None, None]:
        back: Tensor = Deal.apply(gradient, *ctx.counts, ctx.line)  # type: ignore[no-untyped-call]  # torch's is untyped
        return back, None, None, None


def order_long(name: str, input: Any, cut: Pieces, descending: bool) -> tuple[Any, Any]:
    """A tensor of one dimension sorted, equal elements in their order, and where each was: cut as it is."""
    input = completed(name, input)
    layout = input._layout
    policy.check(name, [(layout, layout.replace(placements=[REPLICATE] * layout.mesh.ndim))])
    with no_torch_function():
        trace.record_redistribution(layout, layout, input.numel() * (input.element_size() + 8), backward=False)
        if input.is_meta:
            return tag(torch.empty_like(input), layout), tag(torch.empty_like(input, dtype=torch.long), layout)
        line = _line(cut)
        values, order = input.sort(stable=True, descending=descending)
        starts = [0, *accumulate(cut.sizes)]
        ends = [min(start, starts[-1] - 1) for start in starts[1:-1]]  # an empty piece at the end begins past the last
        found = _positions(*_keys(values.detach(), descending), ends, line) if ends else []
        found = [len(values) if start == starts[-1] else at for start, at in zip(starts[1:-1], found, strict=True)]
        sends = [stop - start for start, stop in pairwise([0, *found, len(values)])]
        table = comm.all_gather(torch.tensor([sends], device=values.device), line.group)
        receives = [int(table[line.pieces.index(piece), line.mine]) for piece in range(len(cut.sizes))]
        dealt: Tensor = Deal.apply(values, sends, receives, line)  # type: ignore[no-untyped-call]  # torch's is untyped
        places = _deal(order + cut.start, sends, receives, line)
        last = _keys(dealt.detach(), descending)[0].sort(stable=True)[1]
        return tag(dealt[last], layout), tag(places[last], layout)


def nth(name: str, input: Any, cut: Pieces, which: int) -> tuple[Any, Any]:
    """The element that comes at this place of the order, and where it is: sums of which one rank has all there is."""
    policy.check(name, [(input._layout, input._layout.replace(placements=[REPLICATE] * input._layout.mesh.ndim))])
    one = cut.flat().one_each
    placements: list[Placement] = [SUM if p.is_shard() else REPLICATE for p in one.placements]
    target = Layout(one.mesh, placements, ())
    with no_torch_function():
        trace.record_redistribution(input._layout, target, 0, backward=False)
        values, order = input.reshape(-1).sort(stable=True)
        first = last = 0
        if not input.is_meta:
            keys, bits = _keys(values.detach(), descending=False)
            total = sum(cut.sizes)
            found = _positions(keys, bits, [which, min(which + 1, total - 1)], _line(cut))
            first, last = found[0], found[1] if which + 1 < total else len(values)
        chosen = values[first:last].sum(dtype=values.dtype), (order + cut.start)[first:last].sum()
        return tag(chosen[0], target), tag(chosen[1], target)
