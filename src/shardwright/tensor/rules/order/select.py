"""Selections by value or by flat index: every rank selects from its own shard.

The number of rows selected by value depends on the values: ranks exchange their counts, and the result stays where
it was found, unevenly sharded (`Ragged`).
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
from shardwright.tensor.rules.shared.basic_index import sharded_over
from shardwright.tensor.rules.shared.flat_index import local_flat_index
from shardwright.tensor.rules.shared.index_range import check_range
from shardwright.tensor.rules.shared.shard_sizes import sized_placement
from shardwright.tensor.rules.shared.shards import Shards, flat_shards_of, shards_of

__all__ = ["sharded_by_rows", "tag_rows"]


def sharded_by_rows(layout: Layout, dim: int = 0) -> Layout:
    """Return the nearest layout in which one mesh dimension shards this dimension, and nothing else is sharded."""
    mesh = layout.mesh
    along = sharded_over(layout, dim)
    sharding = along or tuple(m for m in layout.order if layout.placements[m].is_shard() and mesh.shape[m] > 1)
    placements: list[Placement] = [REPLICATE] * mesh.ndim
    placements[sharding[0]] = layout.placements[sharding[0]] if along else Shard(dim)
    return layout.replace(placements=placements)


def tag_rows(name: str, rows: Tensor, layout: Layout) -> Any:
    """Return one DTensor of the rows that each rank selected from a tensor sharded by rows. Ranks gather counts."""
    shards = shards_of(layout, 0)
    assert shards is not None
    counts = shards.counts(name, rows.shape[0], rows.device)
    if rows.is_meta:  # upper bound
        counts = [size * torch.Size(layout.shape[1:]).numel() for size in shards.sizes]
    mesh_dim = next(m for m, p in enumerate(layout.placements) if p.is_shard())
    placements: list[Placement] = [REPLICATE] * layout.mesh.ndim
    placements[mesh_dim] = sized_placement(0, tuple(counts), sum(counts), layout.mesh.shape[mesh_dim])
    return tag(rows, Layout(layout.mesh, placements, (sum(counts), *rows.shape[1:])))


@composite("nonzero", "argwhere")
def _nonzero(input: Any, *, as_tuple: bool = False) -> Any:
    if flat_shards_of(input._layout) is None:
        return NotImplemented
    layout = sharded_by_rows(input._layout)
    input = redistributed("nonzero", input, layout)
    shards = shards_of(layout, 0)
    assert shards is not None
    with no_torch_function():
        if input.is_meta:
            indices = torch.empty((input.numel(), input.ndim), dtype=torch.long, device="meta")
        else:
            indices = input.nonzero()
            indices[:, 0] += shards.start
    rows = tag_rows("nonzero", indices, layout)
    return tuple(rows.unbind(1)) if as_tuple else rows


@composite("nonzero_static")
def _nonzero_static(input: Any, *, size: int, fill_value: int = -1) -> Any:
    if flat_shards_of(input._layout) is None or size < 0:
        return NotImplemented
    indices = input.nonzero()
    short = size - indices.shape[0]
    return F.pad(indices, (0, 0, 0, short), value=fill_value) if short > 0 else indices[:size]


@composite("masked_select")
def _masked_select(input: Any, mask: Any) -> Any:
    shape = torch.broadcast_shapes(input.shape, mask.shape)  # type: ignore[no-untyped-call]  # untyped in torch
    if mask.dtype != torch.bool or not shape:
        return NotImplemented
    tensors = [input.expand(shape), mask.expand(shape)]
    leading = next((tensor for tensor in tensors if flat_shards_of(tensor._layout) is not None), None)
    if leading is None:
        return NotImplemented
    layout = sharded_by_rows(leading._layout)
    values, local_mask = (redistributed("masked_select", tensor, layout) for tensor in tensors)
    with no_torch_function():
        rows = values.reshape(-1).clone() if values.is_meta else values.masked_select(local_mask)
    return tag_rows("masked_select", rows, layout)


def _unique(name: str, keeps_order: bool) -> Callable[..., Any]:
    """Return the composite of `unique` or `unique_consecutive`.

    Every rank removes the duplicates of its shard, gathers the remaining rows of all ranks, and deduplicates those.
    """

    def find(rows: Tensor, along: dict[str, int]) -> tuple[Tensor, Tensor, Tensor]:
        if rows.is_meta:  # upper bound, as if all were different
            rows = rows if along else rows.reshape(-1)
            counts = torch.empty(rows.shape[along.get("dim", 0)], dtype=torch.long, device="meta")
            return rows, counts, counts
        unique_rows, inverse, counts = getattr(torch, name)(rows, return_inverse=True, return_counts=True, **along)
        return unique_rows, inverse, counts

    def searchable(layout: Layout, dim: Any) -> tuple[Layout, Shards]:
        """Return a layout in which every rank can search its own shard, and its shards."""
        if dim is not None:
            layout = sharded_by_rows(layout, dim % layout.ndim)
            shards = shards_of(layout, dim)
        else:
            layout = sharded_by_rows(layout) if keeps_order else layout
            shards = flat_shards_of(layout)
        assert shards is not None
        return layout, shards

    def unique(input: Any, dim: Any, inverse: bool, counted: bool) -> Any:
        if flat_shards_of(input._layout) is None or 0 in input.shape:
            return NotImplemented
        if dim is not None and not -input.ndim <= dim < input.ndim:
            return NotImplemented  # torch raises the error
        layout, shards = searchable(input._layout, dim)
        input = redistributed(name, input, layout)
        with no_torch_function():
            along = {} if dim is None else {"dim": shards.dim}
            local_rows, to_local, local_counts = find(input.detach(), along)
            rows, sizes = shards.gather_uneven(name, local_rows)
            unique_rows, to_unique, _ = find(rows, along)
            replicated = [REPLICATE] * layout.mesh.ndim
            results = [tag(unique_rows, Layout(layout.mesh, replicated, unique_rows.shape))]
            if inverse:
                index = to_unique[sum(sizes[: shards.mine]) :][to_local] if local_rows.numel() else to_local
                index_layout = layout if dim is None else _row_layout(layout, shards.dim)
                results.append(tag(index, index_layout))
            if counted:
                all_counts, _ = shards.flat().gather_uneven(name, local_counts)
                total = torch.zeros(unique_rows.shape[shards.dim], dtype=all_counts.dtype, device=all_counts.device)
                total = total.index_add(0, to_unique, all_counts)
                results.append(tag(total, Layout(layout.mesh, replicated, total.shape)))
        return tuple(results) if len(results) > 1 else results[0]

    def compose(input: Any, *args: Any, **kwargs: Any) -> Any:
        names = ("return_inverse", "return_counts", "dim")
        arguments = dict(zip(names if keeps_order else ("sorted", *names), args, strict=False)) | kwargs
        if input._layout.is_partial:
            input = completed(name, input)
        return unique(
            input, arguments.get("dim"), arguments.get("return_inverse", False), arguments.get("return_counts", False)
        )

    return compose


def _row_layout(layout: Layout, dim: int) -> Layout:
    """Return the layout of one value per row of the sharded dimension."""
    placements = [
        Shard(0) if isinstance(p, Shard) else Ragged(0, p.sizes) if isinstance(p, Ragged) else p
        for p in layout.placements
    ]
    return Layout(layout.mesh, placements, (layout.shape[dim],), layout.order)


composite("unique")(_unique("unique", keeps_order=False))
composite("unique_consecutive")(_unique("unique_consecutive", keeps_order=True))


@rule("take")
def _take(input: Operand, index: Operand) -> Strategies:
    """Look up flat indices; a rank contributes zero for elements it does not hold."""
    labels: list[Label] = [("taken", d) for d in range(index.ndim)]
    count = torch.Size(input.shape).numel()

    def run(context: LocalContext) -> Local | None:
        if not any(context.ins[0].cut_by(d) for d in range(input.ndim)):
            return None
        region = context.ins[0].region(context.rank)

        def local(_: Any, args: Any, kwargs: dict[str, Any]) -> Any:
            source, index = list(args) + list(kwargs.values())
            check_range("take", index, count, allow_negative=True)
            inside, local_index = local_flat_index(index % count, region, input.shape)
            # The last element is the zero for elements of other ranks.
            padded = torch.cat([source.reshape(-1), source.new_zeros(1)])
            return padded.take(torch.where(inside, local_index, padded.numel() - 1))

        return local

    whole: set[Label] = set(range(input.ndim)) if 0 in input.shape else set()
    at = index_strategies([input, index], [list(range(input.ndim)), labels], [labels], terms=[[0]], whole=whole)
    return Strategies(at, run=run)


@rule("put")
def _put(input: Operand, index: Operand, source: Operand, accumulate: bool = False) -> Strategies:
    """Write at flat indices; a rank writes only the elements it holds."""
    target = list(range(input.ndim))
    count = torch.Size(input.shape).numel()
    same_shape = index.shape == source.shape
    written: list[Label] = [("written", d) if same_shape else None for d in range(index.ndim)]
    sources: list[Label] = written if same_shape else [None] * source.ndim

    def run(context: LocalContext) -> Local | None:
        if not any(context.ins[0].cut_by(d) for d in target):
            return None
        region = context.ins[0].region(context.rank)

        def local(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
            arguments: list[Any] = [*args, *kwargs.values()]
            into, index, values = arguments[:3]
            check_range("put", index, count, allow_negative=True)
            inside, local_index = local_flat_index((index % count).reshape(-1), region, input.shape)
            if index.is_meta:
                return func(into, local_index, values.reshape(-1), accumulate)
            return func(into, local_index[inside], values.reshape(-1)[inside], accumulate)

        return local

    whole: set[Label] = set() if accumulate else set(written)
    whole |= set(target) if 0 in input.shape else set()
    operands = [input, index, source]
    at = index_strategies(operands, [target, written, sources], [target], terms=[[0], [2]], whole=whole)
    return Strategies(at, run=run, written_back=True)
