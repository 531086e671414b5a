"""Operators whose outputs depend on a neighbourhood of inputs: ranks receive the rows they lack from their neighbours.

A `Reach` describes one dimension of such an operator: which inputs an output depends on. From it follow the rank that
computes an output (the one that already holds most of its inputs) and the window of inputs each rank needs.
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
from shardwright.tensor.rules.shared.basic_index import sharded_over
from shardwright.tensor.rules.shared.shard_sizes import shard_sizes, sized_placement

__all__ = [
    "Reach",
    "ShardWindow",
    "Sliding",
    "connected_zero",
    "empty_results",
    "halo_of",
    "per_dim",
    "register_halo",
    "sharded_dims",
    "skip_empty",
    "windows_on",
    "with_halo",
]


class Reach(Protocol):
    """One dimension of an operator with a neighbourhood: its receptive field."""

    @property
    def size(self) -> int:
        """Size of the input."""

    @property
    def result(self) -> int:
        """Size of the output."""

    def needed(self, start: int, stop: int) -> tuple[int, int]:
        """Return the range of inputs that the outputs `start` to `stop` depend on; it may exceed the bounds."""

    def first_output(self, index: int) -> int:
        """Return the first output that belongs to the inputs from `index` on."""


@final
@dataclass(frozen=True, slots=True)
class Sliding:
    """A sliding window: convolution and pooling."""

    size: int
    result: int
    kernel: int  # extent, dilation included
    stride: int
    before: int  # padding in front

    def needed(self, start: int, stop: int) -> tuple[int, int]:
        """Return the inputs of the windows, which may overlap or leave gaps."""
        return start * self.stride - self.before, (stop - 1) * self.stride - self.before + self.kernel

    def first_output(self, index: int) -> int:
        """Assign windows by their centre."""
        return -(-(index + self.before - (self.kernel - 1) // 2) // self.stride)


class ShardWindow(NamedTuple):
    """A rank's part of one dimension: its outputs, the inputs they need, and the part of those within bounds."""

    out: tuple[int, int]
    needed: tuple[int, int]
    window: tuple[int, int]


def per_dim(value: Any, count: int) -> tuple[Any, ...]:
    """Return one value per spatial dimension, from a scalar or a sequence of length 1 or `count`."""
    values = (value,) if isinstance(value, int | float) or value is None else tuple(value)
    return values * count if len(values) == 1 else values


def connected_zero(*tensors: Tensor | None) -> Any:
    """Return a scalar zero that depends on these tensors, so that ranks without work build the same graph.

    It keeps their dtype (torch would sum bool and small integers as int64).
    """
    zeros = [tensor.reshape(-1)[:0].sum(dtype=tensor.dtype) for tensor in tensors if tensor is not None]
    return reduce(torch.add, zeros)


def _output_counts(reach: Reach, sizes: Sequence[int]) -> list[int]:
    """Return the number of outputs assigned to each shard of the input."""

    def first_output(index: int) -> int:
        if index <= 0:
            return 0
        return reach.result if index >= reach.size else min(max(reach.first_output(index), 0), reach.result)

    starts = [first_output(index) for index in (0, *accumulate(sizes))]
    return [stop - start for start, stop in pairwise(starts)]


def _output_placement(layout: Layout, mesh_dim: int, placement: Shard | Ragged, reach: Reach) -> Placement | None:
    """Return the placement of the output that keeps the input sharded; None if no placement describes it."""
    ranks = layout.mesh.shape[mesh_dim]
    if sharded_over(layout, placement.dim) == (mesh_dim,):
        sizes = _output_counts(reach, shard_sizes(reach.size, placement, ranks).tolist())
        return sized_placement(placement.dim, tuple(sizes), reach.result, ranks)
    return placement if isinstance(placement, Shard) or reach.size == reach.result else None


def with_halo(
    at: Callable[[int], list[Strategy]], input: Operand, reaches: Mapping[int, Reach], others: int, outs: int
) -> Callable[[int], list[Strategy]]:
    """Add a strategy that keeps the first input sharded along a dimension with neighbours, the others replicated."""

    def extended(mesh_dim: int) -> list[Strategy]:
        strategies = at(mesh_dim)
        placement = input.layout.placements[mesh_dim]
        if not isinstance(placement, Shard | Ragged) or placement.dim not in reaches:
            return strategies
        if input.layout.mesh.shape[mesh_dim] == 1:
            return strategies
        out = _output_placement(input.layout, mesh_dim, placement, reaches[placement.dim])
        return strategies if out is None else [*strategies, Strategy((placement, *[REPLICATE] * others), (out,) * outs)]

    return extended


def _window(reach: Reach, own: tuple[int, int], out: tuple[int, int]) -> ShardWindow:
    """Return a rank's window for its outputs; empty if it has none."""
    if out[0] == out[1]:
        return ShardWindow(out, (own[0], own[0]), (own[0], own[0]))
    start, stop = reach.needed(*out)
    low = min(max(start, 0), reach.size)
    return ShardWindow(out, (start, stop), (low, max(low, min(stop, reach.size))))


def sharded_dims(layout: Layout, reaches: Mapping[int, Reach]) -> list[int]:
    """Return the dimensions with neighbours that are sharded."""
    return [dim for dim in reaches if sharded_over(layout, dim)]


def windows_on(ins: Layout, outs: Layout, reaches: Mapping[int, Reach], rank: int) -> dict[int, ShardWindow]:
    """Return a rank's window of every sharded dimension with neighbours."""
    own, out = ins.region(rank), outs.region(rank)
    return {
        dim: _window(reaches[dim], (own.offset[dim], own.end[dim]), (out.offset[dim], out.end[dim]))
        for dim in sharded_dims(ins, reaches)
    }


def halo_of(ins: Layout, outs: Layout, reaches: Mapping[int, Reach]) -> Halo:
    """Return the windows of all ranks."""
    windows = []
    for rank in ins.mesh.ranks:
        own = ins.region(rank)
        offset, size = list(own.offset), list(own.size)
        for dim, window in windows_on(ins, outs, reaches, rank).items():
            offset[dim], size[dim] = window.window[0], window.window[1] - window.window[0]
        windows.append(Region(offset, size))
    return Halo(ins, tuple(windows))


def register_halo(name: str, func: Any, rule: Rule, spatial: int) -> None:
    """Register the rule for tensors sharded along one of the last `spatial` dimensions: its local call communicates."""
    op = Op(name, rule)

    @composite(name)
    def compose(*args: Any, **kwargs: Any) -> Any:
        input = args[0] if args else kwargs["input"]
        if not isinstance(input, DTensorBase):
            return NotImplemented
        layout = input._layout
        if not any(sharded_over(layout, dim) for dim in range(max(layout.ndim - spatial, 0), layout.ndim)):
            return NotImplemented
        return call_by_rule(op, False, func, args, kwargs)


def empty_results(context: LocalContext, *tensors: Tensor) -> Any:
    """Return empty results of the right shapes, as functions of the inputs, on a rank without work.

    The first has the dtype of the first input; others are int64 indices.
    """
    shapes = [layout.local_shape(context.rank) for layout in context.outs]
    first = tensors[0].new_zeros(shapes[0]) + connected_zero(*tensors)
    rest = [torch.zeros(shape, dtype=torch.int64, device=first.device) for shape in shapes[1:]]
    return (first, *rest) if rest else first


def skip_empty(context: LocalContext) -> Local | None:
    """Return a local call that skips torch if this rank has no outputs: torch rejects most empty tensors."""
    if all(0 not in layout.local_shape(context.rank) for layout in context.outs):
        return None
    return lambda _, args, kwargs: empty_results(context, *tensors_in((*args, *kwargs.values())))
