"""Operators whose results look at a neighbourhood: along a cut dimension, ranks borrow the rows they lack.

A `Reach` is one dimension of such an operator: which inputs an output looks at. From that follow who computes which
outputs (those whose neighbourhood lies mostly on the rank already) and the window each rank needs for its own.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import reduce
from itertools import accumulate, pairwise
from typing import Any, NamedTuple, Protocol, final

import torch
from torch import Tensor

from shardwright.layout import Layout, Placement, Ragged, Region, Shard
from shardwright.tensor.base.gradient_types import REPLICATE
from shardwright.tensor.base.registry import Op, Rule, composite
from shardwright.tensor.base.strategy import Local, LocalContext, Operand, Strategy
from shardwright.tensor.base.tagging import DTensorBase
from shardwright.tensor.dispatch.arguments import tensors_in
from shardwright.tensor.dispatch.execute import call_by_rule
from shardwright.tensor.redistribute.halo import Halo
from shardwright.tensor.rules.shared.pick import cutting
from shardwright.tensor.rules.shared.piece_sizes import evenly, piece_sizes

__all__ = [
    "Piece",
    "Reach",
    "Sliding",
    "by_halo",
    "connected_zero",
    "each",
    "empty_results",
    "halo_of",
    "or_nothing",
    "pieces_on",
    "where_cut",
    "with_halo",
]


class Reach(Protocol):
    """One dimension of an operator that looks at neighbours."""

    @property
    def size(self) -> int:
        """Of the input."""

    @property
    def result(self) -> int:
        """Of the output."""

    def needed(self, start: int, stop: int) -> tuple[int, int]:
        """The inputs that the outputs from `start` to `stop` look at; they may lie beyond the ends."""

    def border(self, place: int) -> int:
        """The first output that belongs to what lies behind this place of the input."""


@final
@dataclass(frozen=True, slots=True)
class Sliding:
    """A window that slides over the input: convolution and pooling."""

    size: int
    result: int
    kernel: int  # as far as it reaches: dilation included
    stride: int
    before: int  # how much padding there is in front

    def needed(self, start: int, stop: int) -> tuple[int, int]:
        """Windows overlap, or leave gaps; both are fine."""
        return start * self.stride - self.before, (stop - 1) * self.stride - self.before + self.kernel

    def border(self, place: int) -> int:
        """By the middle of the window."""
        return -(-(place + self.before - (self.kernel - 1) // 2) // self.stride)


class Piece(NamedTuple):
    """A rank's part of one dimension: the outputs it computes, what they look at, and what of that there is."""

    out: tuple[int, int]
    needed: tuple[int, int]
    window: tuple[int, int]


def each(value: Any, count: int) -> tuple[Any, ...]:
    """One value per spatial dimension, from what torch takes for that: a number, or a sequence of one, or of all."""
    values = (value,) if isinstance(value, int | float) or value is None else tuple(value)
    return values * count if len(values) == 1 else values


def connected_zero(*tensors: Tensor | None) -> Any:
    """Zero, as a function of these tensors: a rank with nothing to compute has the same graph as the others.

    It has their dtype, of small whole numbers and truths too, which torch otherwise sums up as int64.
    """
    zeros = [tensor.reshape(-1)[:0].sum(dtype=tensor.dtype) for tensor in tensors if tensor is not None]
    return reduce(torch.add, zeros)


def _owned(reach: Reach, pieces: Sequence[int]) -> list[int]:
    """How many outputs go to each piece of the input."""
    places = [0, *accumulate(pieces)]
    borders = [
        0 if place <= 0 else reach.result if place >= reach.size else min(max(reach.border(place), 0), reach.result)
        for place in places
    ]
    return [then - now for now, then in pairwise(borders)]


def _kept_cut(layout: Layout, mesh_dim: int, placement: Shard | Ragged, reach: Reach) -> Placement | None:
    """How the output is cut where the input is cut so; None where no placement says it."""
    ranks = layout.mesh.shape[mesh_dim]
    if cutting(layout, placement.dim) == (mesh_dim,):
        sizes = _owned(reach, piece_sizes(reach.size, placement, ranks).tolist())
        return evenly(placement.dim, tuple(sizes), reach.result, ranks)
    return placement if isinstance(placement, Shard) or reach.size == reach.result else None


def with_halo(
    at: Callable[[int], list[Strategy]], input: Operand, reaches: Mapping[int, Reach], others: int, outs: int
) -> Callable[[int], list[Strategy]]:
    """Further strategies: the first input stays cut along a dimension with neighbours, all other inputs are whole."""

    def extended(mesh_dim: int) -> list[Strategy]:
        strategies = at(mesh_dim)
        placement = input.layout.placements[mesh_dim]
        if not isinstance(placement, Shard | Ragged) or placement.dim not in reaches:
            return strategies
        if input.layout.mesh.shape[mesh_dim] == 1:
            return strategies
        out = _kept_cut(input.layout, mesh_dim, placement, reaches[placement.dim])
        return strategies if out is None else [*strategies, Strategy((placement, *[REPLICATE] * others), (out,) * outs)]

    return extended


def _piece(reach: Reach, own: tuple[int, int], out: tuple[int, int]) -> Piece:
    """A rank's part: its outputs are given; where it has none, it needs nothing."""
    if out[0] == out[1]:
        return Piece(out, (own[0], own[0]), (own[0], own[0]))
    start, stop = reach.needed(*out)
    low = min(max(start, 0), reach.size)
    return Piece(out, (start, stop), (low, max(low, min(stop, reach.size))))


def where_cut(layout: Layout, reaches: Mapping[int, Reach]) -> list[int]:
    """The dimensions with neighbours that are spread over several ranks."""
    return [dim for dim in reaches if cutting(layout, dim)]


def pieces_on(ins: Layout, outs: Layout, reaches: Mapping[int, Reach], rank: int) -> dict[int, Piece]:
    """A rank's part of every cut dimension with neighbours."""
    own, out = ins.region(rank), outs.region(rank)
    return {
        dim: _piece(reaches[dim], (own.offset[dim], own.end[dim]), (out.offset[dim], out.end[dim]))
        for dim in where_cut(ins, reaches)
    }


def halo_of(ins: Layout, outs: Layout, reaches: Mapping[int, Reach]) -> Halo:
    """The windows of all ranks."""
    windows = []
    for rank in ins.mesh.ranks:
        own = ins.region(rank)
        offset, size = list(own.offset), list(own.size)
        for dim, piece in pieces_on(ins, outs, reaches, rank).items():
            offset[dim], size[dim] = piece.window[0], piece.window[1] - piece.window[0]
        windows.append(Region(offset, size))
    return Halo(ins, tuple(windows))


def by_halo(name: str, func: Any, rule: Rule, spatial: int) -> None:
    """Registers the rule's answer for tensors whose last `spatial` dimensions are cut: its local call communicates."""
    op = Op(name, rule)

    @composite(name)
    def compose(*args: Any, **kwargs: Any) -> Any:
        input = args[0] if args else kwargs["input"]
        if not isinstance(input, DTensorBase):
            return NotImplemented
        layout = input._layout
        if not any(cutting(layout, dim) for dim in range(max(layout.ndim - spatial, 0), layout.ndim)):
            return NotImplemented
        return call_by_rule(op, False, func, args, kwargs)


def empty_results(context: LocalContext, *tensors: Tensor) -> Any:
    """Results of a rank that has nothing to compute: of the right shapes, and functions of the inputs.

    The first is of the first input's type, a second one holds places.
    """
    shapes = [layout.local_shape(context.rank) for layout in context.outs]
    first = tensors[0].new_zeros(shapes[0]) + connected_zero(*tensors)
    rest = [torch.zeros(shape, dtype=torch.int64, device=first.device) for shape in shapes[1:]]
    return (first, *rest) if rest else first


def or_nothing(context: LocalContext) -> Local | None:
    """The same call on local tensors, but where there is nothing to compute: torch refuses most empty tensors."""
    if all(0 not in layout.local_shape(context.rank) for layout in context.outs):
        return None
    return lambda _, args, kwargs: empty_results(context, *tensors_in((*args, *kwargs.values())))
