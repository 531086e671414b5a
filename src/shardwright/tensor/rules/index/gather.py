"""Reads by index tensors: `gather`, `index_select`, `x[i, j]`.

A rank that holds a shard of an indexed dimension looks up the indices in it, and the result is a partial sum. All
other dimensions are independent of each other, and may be sharded.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from shardwright.layout import Region
from shardwright.tensor.base.registry import composite, rule
from shardwright.tensor.base.strategy import Label, Labels, Local, LocalContext, Operand, Strategies, index_strategies
from shardwright.tensor.base.tagging import layout_of
from shardwright.tensor.dispatch.arguments import tensors_in
from shardwright.tensor.rules.shared.basic_index import sharded_over
from shardwright.tensor.rules.shared.index_range import check_range
from shardwright.tensor.rules.shared.neighbourhood import connected_zero

__all__ = ["advanced_labels", "advanced_strategies", "locate"]


def advanced_labels(input: Operand, indices: Sequence[Operand | None]) -> tuple[list[Labels], Labels]:
    """Return labels of the input and the index tensors, and of the result, with its dimensions in torch's order."""
    index_tensors = [index for index in indices if index is not None]
    shape = torch.broadcast_shapes(*(i.shape for i in index_tensors))  # type: ignore[no-untyped-call]  # untyped in torch
    new: list[Label] = [("chosen", d) for d in range(len(shape))]
    chosen = [dim for dim, index in enumerate(indices) if index is not None]
    ins: list[Labels] = [list(range(input.ndim))]
    for index in index_tensors:
        first = len(shape) - index.ndim
        ins.append([new[first + d] if size == shape[first + d] else None for d, size in enumerate(index.shape)])
    rest: list[Label] = [d for d in range(input.ndim) if d not in chosen]
    # Adjacent index tensors are replaced by their dimensions in place; otherwise these come first.
    adjacent = chosen == list(range(chosen[0], chosen[-1] + 1))
    axis = chosen[0] if adjacent else 0
    return ins, [*rest[:axis], *new, *rest[axis:]]


def locate(
    name: str, index_tensors: Sequence[Tensor], dims: Sequence[int], region: Region, shape: Sequence[int]
) -> tuple[Tensor, list[Tensor]]:
    """Return which indices are in a region along all these dimensions, and their indices there (0 for the others)."""
    inside = torch.ones((), dtype=torch.bool, device=index_tensors[0].device)
    local_indices = []
    for index, dim in zip(index_tensors, dims, strict=True):
        check_range(name, index, shape[dim], allow_negative=True)
        index = torch.where(index < 0, index + shape[dim], index)
        here = (index >= region.offset[dim]) & (index < region.offset[dim] + region.size[dim])
        local_indices.append(torch.where(here, index - region.offset[dim], 0))
        inside = inside & here
    return inside, local_indices


def _lookup_strategies(
    operands: Sequence[Operand], ins: Sequence[Labels], out: Labels, dims: Sequence[int]
) -> Callable[..., Any]:
    """Return the strategies of a lookup along these dimensions: one rank holds each element, the others add zeros."""
    is_bool = operands[0].dtype == torch.bool
    whole: set[Label] = {dim for dim in dims if not operands[0].shape[dim]}  # nothing to look up in
    terms, reduction = (None, "bor") if is_bool else ([[0]], "sum")
    return index_strategies(operands, ins, [out], terms=terms, reduction=reduction, whole=whole)


def _empty_lookup(context: LocalContext, source: Tensor) -> Tensor:
    """Return the zeros of a rank with an empty shard; they depend on the source if it requires grad."""
    zeros = source.new_zeros(context.outs[0].local_shape(context.rank))
    return _mark_looked_up(zeros + connected_zero(source) if source.requires_grad else zeros)


def _mark_looked_up(result: Tensor) -> Tensor:
    """Mark a result as looked up: it may be written to, like torch's copy."""
    result._lookup_result = True  # type: ignore[attr-defined]  # it is about to become a DTensor
    return result


def advanced_strategies(input: Operand, indices: Sequence[Operand | None]) -> Strategies | None:
    """Return the strategies of `x[:, i, j]` with index tensors; None stands for a full slice."""
    if len(indices) > input.ndim or not any(index is not None and index.ndim for index in indices):
        return None  # 0-dimensional indices give a view
    ins, out = advanced_labels(input, indices)
    operands = [input, *(index for index in indices if index is not None)]
    dims = [dim for dim, index in enumerate(indices) if index is not None]
    trailing = next((axis for axis, label in enumerate(reversed(out)) if isinstance(label, tuple)), 0)

    def run(context: LocalContext) -> Local | None:
        layout = context.ins[0]
        if not any(layout.cut_by(dim) for dim in dims):
            return None
        region = layout.region(context.rank)

        def local(_: Any, args: Any, kwargs: dict[str, Any]) -> Any:
            source, *index_tensors = tensors_in((*args, *kwargs.values()))
            inside, local_indices = locate("x[...]", index_tensors, dims, region, input.shape)
            if any(not region.size[dim] for dim in dims):
                return _empty_lookup(context, source)
            remaining = iter(local_indices)
            result = source[tuple(slice(None) if index is None else next(remaining) for index in indices)]
            return _mark_looked_up(result.masked_fill(~inside.reshape(*inside.shape, *[1] * trailing), 0))

        return local

    return Strategies(_lookup_strategies(operands, ins, out, dims), run=run)


def _local_lookup(
    name: str, input: Operand, axis: int, find: Callable[..., Tensor]
) -> Callable[[LocalContext], Local | None]:
    """Return the local call of a lookup along one dimension if it is sharded: `find(source, index, inside)`."""

    def run(context: LocalContext) -> Local | None:
        layout = context.ins[0]
        if not layout.cut_by(axis):
            return None
        region = layout.region(context.rank)

        def local(_: Any, args: Any, kwargs: dict[str, Any]) -> Any:
            source, index = tensors_in((*args, *kwargs.values()))
            check_range(name, index, input.shape[axis])
            if not region.size[axis]:
                return _empty_lookup(context, source)
            inside, (local_index,) = locate(name, [index], [axis], region, input.shape)
            return _mark_looked_up(find(source, local_index, inside))

        return local

    return run


@rule("index_select")
def _index_select(input: Operand, dim: int, index: Operand) -> Strategies | None:
    if not input.ndim:
        return None
    axis = input.dim(dim)

    def find(source: Tensor, index: Tensor, inside: Tensor) -> Tensor:
        there = inside.reshape(-1, *[1] * (input.ndim - axis - 1))
        return source.index_select(axis, index).masked_fill(~there, 0)

    labels: list[Label] = list(range(input.ndim))
    out = [("i" if index.ndim else None) if d == axis else d for d in range(input.ndim)]
    ins: list[Labels] = [labels, ["i"] * index.ndim]
    at = _lookup_strategies([input, index], ins, out, [axis])
    return Strategies(at, run=_local_lookup("index_select", input, axis, find))


@rule("gather")
def _gather(input: Operand, dim: int, index: Operand, *, sparse_grad: bool = False) -> Strategies | None:
    del sparse_grad
    if input.ndim != index.ndim and max(input.ndim, index.ndim) > 1:
        return None
    axis = input.dim(dim)

    def find(source: Tensor, index: Tensor, inside: Tensor) -> Tensor:
        return source.gather(axis, index).masked_fill(~inside, 0)

    shared: list[Label] = [d if d == axis or input.shape[d] == index.shape[d] else None for d in range(input.ndim)]
    chosen: list[Label] = ["i" if d == axis else shared[d] for d in range(index.ndim)]
    at = _lookup_strategies([input, index], [shared, chosen], chosen, [axis][: input.ndim])
    return Strategies(at, run=_local_lookup("gather", input, axis, find))


@composite("gather")
def _gather_from_start(input: Any, dim: int, index: Any, *, sparse_grad: bool = False) -> Any:
    """If the index covers only the start of another, sharded dimension, take that part first."""
    if input.ndim != index.ndim or not input.ndim:
        return NotImplemented
    layout, axis = layout_of(input), dim % input.ndim
    for d in range(input.ndim):
        if d != axis and index.shape[d] < input.shape[d] and sharded_over(layout, d):
            return torch.gather(input.narrow(d, 0, index.shape[d]), dim, index, sparse_grad=sparse_grad)
    return NotImplemented


@composite("take_along_dim")
def _take_along_dim(input: Any, indices: Any, dim: int | None = None) -> Any:
    if dim is None:
        return input.flatten().gather(0, indices.flatten())
    if input.ndim != indices.ndim or not input.ndim:
        return NotImplemented
    axis = dim % input.ndim
    rest = [(*t.shape[:axis], *t.shape[axis + 1 :]) for t in (input, indices)]
    shape = torch.broadcast_shapes(*rest)  # type: ignore[no-untyped-call]  # untyped in torch
    source, chosen = (t.expand(*shape[:axis], t.shape[axis], *shape[axis:]) for t in (input, indices))
    # Unlike gather, it accepts negative indices.
    return source.gather(axis, torch.where(chosen < 0, chosen + input.shape[axis], chosen))
