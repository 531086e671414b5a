"""Indexing by masks: `x[mask]`, `masked_scatter`. Ranks exchange counts, not elements."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from shardwright.errors import TensorError
from shardwright.layout import Layout
from shardwright.tensor.base import policy
from shardwright.tensor.base.gradient_types import ENTERED, REPLICATE, without_entered
from shardwright.tensor.base.registry import composite, rule
from shardwright.tensor.base.strategy import Operand, Strategies, index_strategies
from shardwright.tensor.base.tagging import DTensorBase, layout_of, no_torch_function, tag
from shardwright.tensor.redistribute.autograd import redistribute_local
from shardwright.tensor.redistribute.implicit import redistributed
from shardwright.tensor.rules.order.select import sharded_by_rows, tag_rows
from shardwright.tensor.rules.shared.neighbourhood import connected_zero
from shardwright.tensor.rules.shared.shards import flat_shards_of, shards_of

__all__ = ["index_by_mask"]


def _same_rows(*tensors: DTensorBase) -> list[Layout] | None:
    """Return the nearest layouts that shard these tensors by rows in the same way; None if nothing is sharded."""
    leading = next((layout for layout in map(layout_of, tensors) if flat_shards_of(layout) is not None), None)
    if leading is None:
        return None
    placements = sharded_by_rows(leading).placements
    return [Layout(leading.mesh, placements, tensor._layout.shape) for tensor in tensors]


def index_by_mask(input: Any, mask: Any, axis: int) -> Any:
    """`x[:, mask]`: select rows by a mask over some dimensions, the first of which is `axis`."""
    count = mask.ndim
    if not count or tuple(mask.shape) != tuple(input.shape[axis : axis + count]):
        return NotImplemented  # torch raises the error
    moved = input.movedim(tuple(range(axis, axis + count)), tuple(range(count)))
    layouts = _same_rows(moved, mask)
    if layouts is None:
        return NotImplemented
    values, chosen = (
        redistributed("x[mask]", tensor, layout) for tensor, layout in zip((moved, mask), layouts, strict=True)
    )
    with no_torch_function():
        rows = values.flatten(0, count - 1).clone() if values.is_meta else values[chosen]
    tagged = tag_rows("x[mask]", rows, layouts[1])
    return tagged.movedim(0, axis) if axis else tagged  # a new tensor, not a view


@rule("masked_scatter")
def _masked_scatter(input: Operand, mask: Operand, source: Operand) -> Strategies:
    """Computed on replicated tensors: the source of an element depends on the mask before it."""
    labels: list[list[Any]] = [[None] * operand.ndim for operand in (input, mask, source)]
    out = [None] * max(input.ndim, mask.ndim)
    return Strategies(
        index_strategies([input, mask, source], labels, [out], terms=[[0], [2]], reduction=None), written_back=True
    )


@composite("masked_scatter")
def _masked_scatter_by_rows(input: Any, mask: Any, source: Any) -> Any:
    """Every rank takes the elements of the source for its rows, which follow those of the ranks before it."""
    shape = torch.broadcast_shapes(input.shape, mask.shape)  # type: ignore[no-untyped-call]  # untyped in torch
    if mask.dtype != torch.bool or not shape or input.dtype != source.dtype:
        return NotImplemented
    both = [input.expand(shape), mask.expand(shape)]
    layouts = _same_rows(*both)
    if layouts is None:
        return NotImplemented
    values, chosen = (
        redistributed("masked_scatter", tensor, layout) for tensor, layout in zip(both, layouts, strict=True)
    )
    shards = shards_of(layouts[0], 0)
    assert shards is not None
    given = layout_of(source)
    target = given.replace(placements=[ENTERED if p.is_shard() else REPLICATE for p in layouts[0].placements])
    policy.check("masked_scatter", [(given, without_entered(target))])
    with no_torch_function():
        target = target if source.requires_grad else without_entered(target)
        flat = redistribute_local(source, given, target).reshape(-1)
        if values.is_meta:
            return tag(values + connected_zero(flat), layouts[0])
        counts = shards.counts("masked_scatter", int(chosen.sum()), values.device)
        if sum(counts) > flat.numel():
            raise TensorError(
                f"masked_scatter: the mask selects {sum(counts)} elements, but source has only {flat.numel()}"
            )
        own = flat.narrow(0, sum(counts[: shards.mine]), counts[shards.mine])
        return tag(values.masked_scatter(chosen, own), layouts[0])


def _clamped(input: Any, indices: Sequence[Any]) -> tuple[Any, ...]:
    sizes = input.shape
    return tuple(None if i is None else i.clamp(-sizes[dim], sizes[dim] - 1) for dim, i in enumerate(indices))


@composite("_unsafe_masked_index")
def _masked_index(input: Any, mask: Any, indices: Sequence[Any], fill: Any) -> Any:
    """Indices may be out of bounds where the mask is False."""
    if not input.numel():
        return NotImplemented
    index = tuple(slice(None) if i is None else i for i in _clamped(input, indices))
    return input[index].masked_fill(mask.logical_not(), fill)


@composite("_unsafe_masked_index_put_accumulate")
def _masked_index_add(input: Any, mask: Any, indices: Sequence[Any], values: Any) -> Any:
    if not input.numel():
        return NotImplemented
    added = values.masked_fill(mask.logical_not(), 0)
    return torch.ops.aten.index_put(input, list(_clamped(input, indices)), added, True)
