"""Elements chosen by value or by number: every rank chooses from its own.

What is chosen by value has as many rows as the values say: ranks tell each other how many they have found, and the
result stays where it was found, unevenly cut (`Ragged`).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812  # torch's own short name
from torch import Tensor

from shardwright.layout import Layout, Placement, Ragged, Shard
from shardwright.tensor.base.gradient_types import REPLICATE
from shardwright.tensor.base.registry import composite, rule
from shardwright.tensor.base.strategy import Label, Local, LocalContext, Operand, Strategies, index_strategies
from shardwright.tensor.base.tagging import no_torch_function, tag
from shardwright.tensor.redistribute.implicit import completed, redistributed
from shardwright.tensor.rules.shared.flat_index import place_in_region
from shardwright.tensor.rules.shared.index_range import check_range
from shardwright.tensor.rules.shared.pick import cutting
from shardwright.tensor.rules.shared.piece_sizes import evenly
from shardwright.tensor.rules.shared.pieces import Pieces, pieces_of, pieces_of_all

__all__ = ["as_found", "by_rows"]


def by_rows(layout: Layout, dim: int = 0) -> Layout:
    """The nearest layout in which one mesh dimension cuts this dimension, and nothing else is cut."""
    mesh = layout.mesh
    along = cutting(layout, dim)
    cuts = along or tuple(m for m in layout.order if layout.placements[m].is_shard() and mesh.shape[m] > 1)
    placements: list[Placement] = [REPLICATE] * mesh.ndim
    placements[cuts[0]] = layout.placements[cuts[0]] if along else Shard(dim)
    return layout.replace(placements=placements)


def as_found(name: str, rows: Tensor, layout: Layout) -> Any:
    """Rows found on each rank, of a tensor laid out by rows, as one tensor: as many as all have found."""
    cut = pieces_of(layout, 0)
    assert cut is not None
    counts = cut.counts(name, rows.shape[0], rows.device)
    if rows.is_meta:  # the most there can be
        counts = [size * torch.Size(layout.shape[1:]).numel() for size in cut.sizes]
    mesh_dim = next(m for m, p in enumerate(layout.placements) if p.is_shard())
    placements: list[Placement] = [REPLICATE] * layout.mesh.ndim
    placements[mesh_dim] = evenly(0, tuple(counts), sum(counts), layout.mesh.shape[mesh_dim])
    return tag(rows, Layout(layout.mesh, placements, (sum(counts), *rows.shape[1:])))


@composite("nonzero", "argwhere")
def _nonzero(input: Any, *, as_tuple: bool = False) -> Any:
    if pieces_of_all(input._layout) is None:
        return NotImplemented
    layout = by_rows(input._layout)
    input = redistributed("nonzero", input, layout)
    cut = pieces_of(layout, 0)
    assert cut is not None
    with no_torch_function():
        if input.is_meta:
            found = torch.empty((input.numel(), input.ndim), dtype=torch.long, device="meta")
        else:
            found = input.nonzero()
            found[:, 0] += cut.start
    rows = as_found("nonzero", found, layout)
    return tuple(rows.unbind(1)) if as_tuple else rows


@composite("nonzero_static")
def _nonzero_static(input: Any, *, size: int, fill_value: int = -1) -> Any:
    if pieces_of_all(input._layout) is None or size < 0:
        return NotImplemented
    found = input.nonzero()
    short = size - found.shape[0]
    return F.pad(found, (0, 0, 0, short), value=fill_value) if short > 0 else found[:size]


@composite("masked_select")
def _masked_select(input: Any, mask: Any) -> Any:
    shape = torch.broadcast_shapes(input.shape, mask.shape)  # type: ignore[no-untyped-call]  # torch leaves it out
    if mask.dtype != torch.bool or not shape:
        return NotImplemented
    both = [input.expand(shape), mask.expand(shape)]
    leading = next((each for each in both if pieces_of_all(each._layout) is not None), None)
    if leading is None:
        return NotImplemented
    layout = by_rows(leading._layout)
    values, chosen = (redistributed("masked_select", each, layout) for each in both)
    with no_torch_function():
        found = values.reshape(-1).clone() if values.is_meta else values.masked_select(chosen)
    return as_found("masked_select", found, layout)


def _unique(name: str, keeps_order: bool) -> Callable[..., Any]:
    """Equal elements once: every rank its own, then all that were found. Few, where there are many equal ones."""

    def find(rows: Tensor, along: dict[str, int]) -> tuple[Tensor, Tensor, Tensor]:
        if rows.is_meta:  # as if all were different: the most there can be
            rows = rows if along else rows.reshape(-1)
            numbers = torch.empty(rows.shape[along.get("dim", 0)], dtype=torch.long, device="meta")
            return rows, numbers, numbers
        found, inverse, counts = getattr(torch, name)(rows, return_inverse=True, return_counts=True, **along)
        return found, inverse, counts

    def laid_out(layout: Layout, dim: Any) -> tuple[Layout, Pieces]:
        """A layout in which every rank finds its own, and the pieces of that."""
        if dim is not None:
            layout = by_rows(layout, dim % layout.ndim)
            cut = pieces_of(layout, dim)
        else:
            layout = by_rows(layout) if keeps_order else layout
            cut = pieces_of_all(layout)
        assert cut is not None
        return layout, cut

    def together(input: Any, dim: Any, inverse: bool, counted: bool) -> Any:
        if pieces_of_all(input._layout) is None or 0 in input.shape:
            return NotImplemented
        if dim is not None and not -input.ndim <= dim < input.ndim:
            return NotImplemented  # torch says what is wrong with it
        layout, cut = laid_out(input._layout, dim)
        input = redistributed(name, input, layout)
        with no_torch_function():
            along = {} if dim is None else {"dim": cut.dim}
            own, to_own, own_counts = find(input.detach(), along)
            rows, sizes = cut.gathered_as_found(name, own)
            found, to_found, _ = find(rows, along)
            everywhere = [REPLICATE] * layout.mesh.ndim
            results = [tag(found, Layout(layout.mesh, everywhere, found.shape))]
            if inverse:
                place = to_found[sum(sizes[: cut.mine]) :][to_own] if own.numel() else to_own
                spread = layout if dim is None else _of_one_dim(layout, cut.dim)
                results.append(tag(place, spread))
            if counted:
                each, _ = cut.flat().gathered_as_found(name, own_counts)
                total = torch.zeros(found.shape[cut.dim], dtype=each.dtype, device=each.device)
                total = total.index_add(0, to_found, each)
                results.append(tag(total, Layout(layout.mesh, everywhere, total.shape)))
        return tuple(results) if len(results) > 1 else results[0]

    def compose(input: Any, *args: Any, **kwargs: Any) -> Any:
        names = ("return_inverse", "return_counts", "dim")
        given = dict(zip(names if keeps_order else ("sorted", *names), args, strict=False)) | kwargs
        if input._layout.is_partial:
            input = completed(name, input)
        return together(input, given.get("dim"), given.get("return_inverse", False), given.get("return_counts", False))

    return compose


def _of_one_dim(layout: Layout, dim: int) -> Layout:
    """The layout of a number for every row of the dimension that is cut."""
    placements = [
        Shard(0) if isinstance(p, Shard) else Ragged(0, p.sizes) if isinstance(p, Ragged) else p
        for p in layout.placements
    ]
    return Layout(layout.mesh, placements, (layout.shape[dim],), layout.order)


composite("unique")(_unique("unique", keeps_order=False))
composite("unique_consecutive")(_unique("unique_consecutive", keeps_order=True))


@rule("take")
def _take(input: Operand, index: Operand) -> Strategies:
    """By number through the whole tensor: a rank that does not have an element adds nothing to it."""
    labels: list[Label] = [("taken", d) for d in range(index.ndim)]
    count = torch.Size(input.shape).numel()

    def run(context: LocalContext) -> Local | None:
        if not any(context.ins[0].cut_by(d) for d in range(input.ndim)):
            return None
        region = context.ins[0].region(context.rank)

        def local(_: Any, args: Any, kwargs: dict[str, Any]) -> Any:
            source, index = list(args) + list(kwargs.values())
            check_range("take", index, count, from_the_end=True)
            inside, place = place_in_region(index % count, region, input.shape)
            # Behind its own elements, a rank has a zero.
            own = torch.cat([source.reshape(-1), source.new_zeros(1)])
            return own.take(torch.where(inside, place, own.numel() - 1))

        return local

    whole: set[Label] = set(range(input.ndim)) if 0 in input.shape else set()
    at = index_strategies([input, index], [list(range(input.ndim)), labels], [labels], terms=[[0]], whole=whole)
    return Strategies(at, run=run)


@rule("put")
def _put(input: Operand, index: Operand, source: Operand, accumulate: bool = False) -> Strategies:
    """A rank writes what belongs to its part, and leaves the rest."""
    target = list(range(input.ndim))
    count = torch.Size(input.shape).numel()
    alike = index.shape == source.shape
    written: list[Label] = [("written", d) if alike else None for d in range(index.ndim)]
    sources: list[Label] = written if alike else [None] * source.ndim

    def run(context: LocalContext) -> Local | None:
        if not any(context.ins[0].cut_by(d) for d in target):
            return None
        region = context.ins[0].region(context.rank)

        def local(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
            given: list[Any] = [*args, *kwargs.values()]
            into, index, values = given[:3]
            check_range("put", index, count, from_the_end=True)
            inside, place = place_in_region((index % count).reshape(-1), region, input.shape)
            if index.is_meta:
                return func(into, place, values.reshape(-1), accumulate)
            return func(into, place[inside], values.reshape(-1)[inside], accumulate)

        return local

    whole: set[Label] = set() if accumulate else set(written)
    whole |= set(target) if 0 in input.shape else set()
    operands = [input, index, source]
    at = index_strategies(operands, [target, written, sources], [target], terms=[[0], [2]], whole=whole)
    return Strategies(at, run=run, written_back=True)
