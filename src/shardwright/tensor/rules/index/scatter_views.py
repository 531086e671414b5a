"""`select_scatter`, `slice_scatter`, `diagonal_scatter`: replace a view of a tensor.

Along the dimensions of the view, every rank replaces the part of the view in its shard.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from shardwright.layout import Ragged, Shard
from shardwright.tensor.base.registry import rule
from shardwright.tensor.base.strategy import Label, Local, LocalContext, Operand, Strategies, Strategy, index_strategies
from shardwright.tensor.dispatch.arguments import tensors_in
from shardwright.tensor.rules.shape.diagonal import diagonal_in_region
from shardwright.tensor.rules.shared.basic_index import sharded_over
from shardwright.tensor.rules.shared.neighbourhood import connected_zero
from shardwright.tensor.rules.shared.shard_sizes import shard_sizes, sized_placement

__all__: list[str] = []


def _unchanged(input: Tensor, src: Tensor) -> Tensor:
    """Return the input on a rank with nothing to replace; it still depends on both."""
    return input + connected_zero(src) if src.requires_grad else input.clone()


@rule("select_scatter")
def _select_scatter(input: Operand, src: Operand, dim: int, index: Any) -> Strategies | None:
    if type(index) is not int or src.ndim != input.ndim - 1:
        return None
    axis = input.dim(dim)
    labels: list[Label] = list(range(input.ndim))

    def run(context: LocalContext) -> Local | None:
        layout = context.ins[0]
        if not layout.cut_by(axis):
            return None
        region = layout.region(context.rank)
        at = index % input.shape[axis] - region.offset[axis]

        def local(_: Any, args: Any, kwargs: dict[str, Any]) -> Any:
            into, values = tensors_in((*args, *kwargs.values()))
            if not 0 <= at < region.size[axis]:
                return _unchanged(into, values)
            return torch.select_scatter(into, values, axis, at)

        return local

    strategies = index_strategies(
        [input, src], [labels, labels[:axis] + labels[axis + 1 :]], [labels], terms=[[0], [1]]
    )
    return Strategies(strategies, run=run)


def _overlap(part: slice, offset: int, size: int) -> tuple[int, int, int]:
    """Return the overlap of a slice with a shard: its first element, their number, and their offset in the shard."""
    count = len(range(part.start, part.stop, part.step))
    first = min(max(0, -(-(offset - part.start) // part.step)), count)
    last = min(max(0, -(-(offset + size - part.start) // part.step)), count)
    return first, last - first, part.start + first * part.step - offset


@rule("slice_scatter")
def _slice_scatter(
    input: Operand, src: Operand, dim: int = 0, start: Any = None, end: Any = None, step: Any = 1
) -> Strategies | None:
    if not input.ndim or src.ndim != input.ndim or not all(type(i) is int or i is None for i in (start, end, step)):
        return None
    axis = input.dim(dim)
    part = slice(*slice(start, end, step).indices(input.shape[axis]))
    labels: list[Label] = list(range(input.ndim))
    at = index_strategies(
        [input, src], [labels, [None if d == axis else d for d in labels]], [labels], terms=[[0], [1]]
    )

    def run(context: LocalContext) -> Local | None:
        layout = context.ins[0]
        if not layout.cut_by(axis):
            return None
        region = layout.region(context.rank)
        first, count, where = _overlap(part, region.offset[axis], region.size[axis])
        src_sharded = bool(context.ins[1].cut_by(axis))

        def local(_: Any, args: Any, kwargs: dict[str, Any]) -> Any:
            into, values = tensors_in((*args, *kwargs.values()))
            if not count:
                return _unchanged(into, values)
            own = values if src_sharded else values.narrow(axis, first, count)
            return torch.slice_scatter(into, own, axis, where, where + (count - 1) * part.step + 1, part.step)

        return local

    return Strategies(_with_overlap_strategy(input, axis, part, at), run=run)


def _with_overlap_strategy(
    input: Operand, axis: int, part: slice, at: Callable[[int], list[Strategy]]
) -> Callable[[int], list[Strategy]]:
    """Add a strategy that shards the replacement of a slice of a sharded dimension as the slice is sharded."""

    def extended(mesh_dim: int) -> list[Strategy]:
        placement, strategies = input.layout.placements[mesh_dim], at(mesh_dim)
        if not isinstance(placement, Shard | Ragged) or sharded_over(input.layout, axis) != (mesh_dim,):
            return strategies
        ranks = input.layout.mesh.shape[mesh_dim]
        sizes, offset = [], 0
        for size in shard_sizes(input.shape[axis], placement, ranks).tolist():
            sizes.append(_overlap(part, offset, size)[1])
            offset += size
        return [
            Strategy((placement, sized_placement(axis, tuple(sizes), sum(sizes), ranks)), (placement,)),
            *strategies,
        ]

    return extended


@rule("diagonal_scatter")
def _diagonal_scatter(input: Operand, src: Operand, offset: int = 0, dim1: int = 0, dim2: int = 1) -> Strategies:
    row, column = input.dim(dim1), input.dim(dim2)
    labels: list[Label] = list(range(input.ndim))

    def run(context: LocalContext) -> Local | None:
        layout = context.ins[0]
        if not (layout.cut_by(row) or layout.cut_by(column)):
            return None
        region = layout.region(context.rank)
        first, count, shifted = diagonal_in_region(region, row, column, offset)

        def local(_: Any, args: Any, kwargs: dict[str, Any]) -> Any:
            into, values = tensors_in((*args, *kwargs.values()))
            if not count:
                return _unchanged(into, values)
            return torch.diagonal_scatter(into, values.narrow(-1, first, count), shifted, row, column)

        return local

    diagonal: list[Label] = [*(d for d in labels if d not in (row, column)), None]
    return Strategies(index_strategies([input, src], [labels, diagonal], [labels], terms=[[0], [1]]), run=run)
