"""Elements chosen by masks: `x[mask]`, `masked_scatter`. What lies before a rank's part is counted, not moved."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from shardwright.errors import TensorError
from shardwright.layout import Layout
from shardwright.tensor.base import policy
from shardwright.tensor.base.gradient_types import ENTERED, REPLICATE, settled
from shardwright.tensor.base.registry import composite, rule
from shardwright.tensor.base.strategy import Operand, Strategies, index_strategies
from shardwright.tensor.base.tagging import DTensorBase, layout_of, no_torch_function, tag
from shardwright.tensor.redistribute.autograd import redistribute_local
from shardwright.tensor.redistribute.implicit import redistributed
from shardwright.tensor.rules.order.select import as_found, by_rows
from shardwright.tensor.rules.shared.neighbourhood import connected_zero
from shardwright.tensor.rules.shared.pieces import pieces_of, pieces_of_all

__all__ = ["pick_masked"]


def _same_rows(*tensors: DTensorBase) -> list[Layout] | None:
    """The nearest layouts in which tensors of as many rows are cut by rows alike; None where nothing is cut."""
    leading = next((layout for layout in map(layout_of, tensors) if pieces_of_all(layout) is not None), None)
    if leading is None:
        return None
    placements = by_rows(leading).placements
    return [Layout(leading.mesh, placements, tensor._layout.shape) for tensor in tensors]


def pick_masked(input: Any, mask: Any, place: int) -> Any:
    """`x[:, mask]`: rows chosen by a mask over some of the dimensions, the first of which is at `place`."""
    count = mask.ndim
    if not count or tuple(mask.shape) != tuple(input.shape[place : place + count]):
        return NotImplemented  # torch says what is wrong with it
    moved = input.movedim(tuple(range(place, place + count)), tuple(range(count)))
    layouts = _same_rows(moved, mask)
    if layouts is None:
        return NotImplemented
    values, chosen = (
        redistributed("x[mask]", each, layout) for each, layout in zip((moved, mask), layouts, strict=True)
    )
    with no_torch_function():
        found = values.flatten(0, count - 1).clone() if values.is_meta else values[chosen]
    return as_found("x[mask]", found, layouts[1]).movedim(0, place)


@rule("masked_scatter")
def _masked_scatter(input: Operand, mask: Operand, source: Operand) -> Strategies:
    """On whole tensors, if on these: where an element comes from hangs on all that are before it."""
    labels: list[list[Any]] = [[None] * operand.ndim for operand in (input, mask, source)]
    out = [None] * max(input.ndim, mask.ndim)
    return Strategies(
        index_strategies([input, mask, source], labels, [out], terms=[[0], [2]], reduction=None), written_back=True
    )


@composite("masked_scatter")
def _masked_scatter_by_rows(input: Any, mask: Any, source: Any) -> Any:
    """Every rank takes what is meant for its rows: it begins behind what the ranks before it take."""
    shape = torch.broadcast_shapes(input.shape, mask.shape)  # type: ignore[no-untyped-call]  # torch leaves it out
    if mask.dtype != torch.bool or not shape or input.dtype != source.dtype:
        return NotImplemented
    both = [input.expand(shape), mask.expand(shape)]
    layouts = _same_rows(*both)
    if layouts is None:
        return NotImplemented
    values, chosen = (redistributed("masked_scatter", each, layout) for each, layout in zip(both, layouts, strict=True))
    cut = pieces_of(layouts[0], 0)
    assert cut is not None
    given = layout_of(source)
    target = given.replace(placements=[ENTERED if p.is_shard() else REPLICATE for p in layouts[0].placements])
    policy.check("masked_scatter", [(given, settled(target))])
    with no_torch_function():
        flat = redistribute_local(source, given, target if source.requires_grad else settled(target)).reshape(-1)
        if values.is_meta:
            return tag(values + connected_zero(flat), layouts[0])
        counts = cut.counts("masked_scatter", int(chosen.sum()), values.device)
        if sum(counts) > flat.numel():
            raise TensorError(f"masked_scatter: {sum(counts)} elements are to be replaced, source has {flat.numel()}")
        own = flat.narrow(0, sum(counts[: cut.mine]), counts[cut.mine])
        return tag(values.masked_scatter(chosen, own), layouts[0])


def _clamped(input: Any, indices: Sequence[Any]) -> tuple[Any, ...]:
    sizes = input.shape
    return tuple(None if i is None else i.clamp(-sizes[dim], sizes[dim] - 1) for dim, i in enumerate(indices))


@composite("_unsafe_masked_index")
def _masked_index(input: Any, mask: Any, indices: Sequence[Any], fill: Any) -> Any:
    """Where the mask is not true, the indices may be out of bounds."""
    if not input.numel():
        return NotImplemented
    places = tuple(slice(None) if i is None else i for i in _clamped(input, indices))
    return input[places].masked_fill(mask.logical_not(), fill)


@composite("_unsafe_masked_index_put_accumulate")
def _masked_index_add(input: Any, mask: Any, indices: Sequence[Any], values: Any) -> Any:
    if not input.numel():
        return NotImplemented
    added = values.masked_fill(mask.logical_not(), 0)
    return torch.ops.aten.index_put(input, list(_clamped(input, indices)), added, True)
