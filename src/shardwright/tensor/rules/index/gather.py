"""Elements read by tensors of numbers: `gather`, `index_select`, `x[i, j]`.

A rank that holds some of a dimension that the numbers run over looks up those, and the sum over ranks is the result.
All other dimensions are independent of each other, and may be cut.
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
from shardwright.tensor.rules.shared.index_range import check_range
from shardwright.tensor.rules.shared.neighbourhood import connected_zero
from shardwright.tensor.rules.shared.pick import cutting

__all__ = ["advanced_labels", "advanced_strategies", "located"]


def advanced_labels(input: Operand, indices: Sequence[Operand | None]) -> tuple[list[Labels], Labels]:
    """Labels of the input and the tensors of numbers, and of the result, as torch arranges its dimensions."""
    numbers = [index for index in indices if index is not None]
    shape = torch.broadcast_shapes(*(i.shape for i in numbers))  # type: ignore[no-untyped-call]  # torch leaves it out
    new: list[Label] = [("chosen", d) for d in range(len(shape))]
    chosen = [dim for dim, index in enumerate(indices) if index is not None]
    ins: list[Labels] = [list(range(input.ndim))]
    for index in numbers:
        first = len(shape) - index.ndim
        ins.append([new[first + d] if size == shape[first + d] else None for d, size in enumerate(index.shape)])
    rest: list[Label] = [d for d in range(input.ndim) if d not in chosen]
    # Where the tensors stand side by side their dimensions take their place, otherwise they come first.
    together = chosen == list(range(chosen[0], chosen[-1] + 1))
    place = chosen[0] if together else 0
    return ins, [*rest[:place], *new, *rest[place:]]


def located(
    name: str, numbers: Sequence[Tensor], dims: Sequence[int], region: Region, shape: Sequence[int]
) -> tuple[Tensor, list[Tensor]]:
    """Which numbers lie in a region, along all these dimensions, and what they are there (0 for the others)."""
    inside = torch.ones((), dtype=torch.bool, device=numbers[0].device)
    places = []
    for number, dim in zip(numbers, dims, strict=True):
        check_range(name, number, shape[dim], from_the_end=True)
        number = torch.where(number < 0, number + shape[dim], number)
        here = (number >= region.offset[dim]) & (number < region.offset[dim] + region.size[dim])
        places.append(torch.where(here, number - region.offset[dim], 0))
        inside = inside & here
    return inside, places


def _ways(operands: Sequence[Operand], ins: Sequence[Labels], out: Labels, dims: Sequence[int]) -> Callable[..., Any]:
    """Strategies of a lookup along these dimensions, in which lookups of which all but one give nothing add up."""
    truths = operands[0].dtype == torch.bool
    whole: set[Label] = {dim for dim in dims if not operands[0].shape[dim]}  # nothing to look up in
    terms, reduction = (None, "bor") if truths else ([[0]], "sum")
    return index_strategies(operands, ins, [out], terms=terms, reduction=reduction, whole=whole)


def _nothing(context: LocalContext, source: Tensor) -> Tensor:
    """What a rank finds that has nothing to look up in: zeros, and a function of the source all the same."""
    zeros = source.new_zeros(context.outs[0].local_shape(context.rank))
    return _addend(zeros + connected_zero(source) if source.requires_grad else zeros)


def _addend(found: Tensor) -> Tensor:
    """What a rank has found, marked: it may be written to, as what torch has looked up."""
    found._lookup_result = True  # type: ignore[attr-defined]  # it is about to become a DTensor
    return found


def advanced_strategies(input: Operand, indices: Sequence[Operand | None]) -> Strategies | None:
    """`x[:, i, j]` with tensors of whole numbers; None stands for a dimension that is taken whole."""
    if len(indices) > input.ndim or not any(index is not None and index.ndim for index in indices):
        return None  # numbers without dimensions pick a view
    ins, out = advanced_labels(input, indices)
    operands = [input, *(index for index in indices if index is not None)]
    dims = [dim for dim, index in enumerate(indices) if index is not None]
    behind = next((place for place, label in enumerate(reversed(out)) if isinstance(label, tuple)), 0)

    def run(context: LocalContext) -> Local | None:
        layout = context.ins[0]
        if not any(layout.cut_by(dim) for dim in dims):
            return None
        region = layout.region(context.rank)

        def local(_: Any, args: Any, kwargs: dict[str, Any]) -> Any:
            source, *numbers = tensors_in((*args, *kwargs.values()))
            inside, places = located("x[...]", numbers, dims, region, input.shape)
            if any(not region.size[dim] for dim in dims):
                return _nothing(context, source)
            each = iter(places)
            found = source[tuple(slice(None) if index is None else next(each) for index in indices)]
            return _addend(found.masked_fill(~inside.reshape(*inside.shape, *[1] * behind), 0))

        return local

    return Strategies(_ways(operands, ins, out, dims), run=run)


def _lookup_result(
    name: str, input: Operand, place: int, find: Callable[..., Tensor]
) -> Callable[[LocalContext], Local | None]:
    """The local call of a lookup along one dimension, where that is cut: `find(source, index, inside)`."""

    def run(context: LocalContext) -> Local | None:
        layout = context.ins[0]
        if not layout.cut_by(place):
            return None
        region = layout.region(context.rank)

        def local(_: Any, args: Any, kwargs: dict[str, Any]) -> Any:
            source, index = tensors_in((*args, *kwargs.values()))
            check_range(name, index, input.shape[place])
            if not region.size[place]:
                return _nothing(context, source)
            inside, (found,) = located(name, [index], [place], region, input.shape)
            return _addend(find(source, found, inside))

        return local

    return run


@rule("index_select")
def _index_select(input: Operand, dim: int, index: Operand) -> Strategies | None:
    if not input.ndim:
        return None
    place = input.dim(dim)

    def find(source: Tensor, index: Tensor, inside: Tensor) -> Tensor:
        there = inside.reshape(-1, *[1] * (input.ndim - place - 1))
        return source.index_select(place, index).masked_fill(~there, 0)

    labels: list[Label] = list(range(input.ndim))
    out = [("i" if index.ndim else None) if d == place else d for d in range(input.ndim)]
    ins: list[Labels] = [labels, ["i"] * index.ndim]
    at = _ways([input, index], ins, out, [place])
    return Strategies(at, run=_lookup_result("index_select", input, place, find))


@rule("gather")
def _gather(input: Operand, dim: int, index: Operand, *, sparse_grad: bool = False) -> Strategies | None:
    del sparse_grad
    if input.ndim != index.ndim and max(input.ndim, index.ndim) > 1:
        return None
    place = input.dim(dim)

    def find(source: Tensor, index: Tensor, inside: Tensor) -> Tensor:
        return source.gather(place, index).masked_fill(~inside, 0)

    shared: list[Label] = [d if d == place or input.shape[d] == index.shape[d] else None for d in range(input.ndim)]
    chosen: list[Label] = ["i" if d == place else shared[d] for d in range(index.ndim)]
    at = _ways([input, index], [shared, chosen], chosen, [place][: input.ndim])
    return Strategies(at, run=_lookup_result("gather", input, place, find))


@composite("gather")
def _gather_of_part(input: Any, dim: int, index: Any, *, sparse_grad: bool = False) -> Any:
    """Of a cut dimension of which the numbers see the beginning only, that is taken first."""
    if input.ndim != index.ndim or not input.ndim:
        return NotImplemented
    layout, place = layout_of(input), dim % input.ndim
    for d in range(input.ndim):
        if d != place and index.shape[d] < input.shape[d] and cutting(layout, d):
            return torch.gather(input.narrow(d, 0, index.shape[d]), dim, index, sparse_grad=sparse_grad)
    return NotImplemented


@composite("take_along_dim")
def _take_along_dim(input: Any, indices: Any, dim: int | None = None) -> Any:
    if dim is None:
        return input.flatten().gather(0, indices.flatten())
    if input.ndim != indices.ndim or not input.ndim:
        return NotImplemented
    place = dim % input.ndim
    rest = [(*t.shape[:place], *t.shape[place + 1 :]) for t in (input, indices)]
    shape = torch.broadcast_shapes(*rest)  # type: ignore[no-untyped-call]  # torch leaves it out
    source, chosen = (t.expand(*shape[:place], t.shape[place], *shape[place:]) for t in (input, indices))
    # Unlike gather, it counts from the end, too.
    return source.gather(place, torch.where(chosen < 0, chosen + input.shape[place], chosen))
