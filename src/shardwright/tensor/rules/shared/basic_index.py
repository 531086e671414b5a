"""Basic indexing (integers and slices) of shards without communication: every rank keeps a view of its overlap.

A slice of a sharded dimension is sharded unevenly (`Ragged`). A single index of a sharded dimension is held by one
rank: the others hold zeros, and the result is a partial sum.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeAlias

import torch
from torch import Tensor

from shardwright.layout import Layout, Partial, Placement, Ragged, Region, Shard
from shardwright.tensor.base.gradient_types import REPLICATE, SUM
from shardwright.tensor.base.strategy import Local, LocalContext, MeshStrategy, Operand
from shardwright.tensor.dispatch.arguments import tensors_in
from shardwright.tensor.rules.shared.shard_sizes import shard_sizes, sized_placement

__all__ = [
    "Item",
    "first_tensor",
    "indexing_strategy",
    "needs_redistribution",
    "normalize_index",
    "sharded_over",
    "slices_strategy",
]

# An item of a normalized index: a non-negative index, a slice(start, stop, step), or None for a new dimension.
Item: TypeAlias = int | slice | None


def first_tensor(args: Sequence[Any], kwargs: dict[str, Any]) -> Tensor:
    """Return the first tensor of a call, which may have been passed by keyword."""
    return args[0] if args else next(tensors_in(kwargs.values()))


def normalize_index(index: Any, shape: Sequence[int]) -> tuple[Item, ...]:
    """Expand a basic index (int, slice, None, Ellipsis) to one item per dimension, without negative indices."""
    given = index if isinstance(index, tuple) else (index,)
    used = sum(item is not None and item is not Ellipsis for item in given)
    rest = (slice(None),) * (len(shape) - used)
    if Ellipsis in given:
        position = given.index(Ellipsis)
        given = (*given[:position], *rest, *(item for item in given[position + 1 :] if item is not Ellipsis))
    else:
        given = (*given, *rest)
    items: list[Item] = []
    sizes = iter(shape)
    for item in given:
        if item is None:
            items.append(None)
            continue
        size = next(sizes)
        items.append(slice(*item.indices(size)) if isinstance(item, slice) else item % size)
    return tuple(items)


def sharded_over(layout: Layout, dim: int) -> tuple[int, ...]:
    """Return the mesh dimensions of more than one rank that shard a tensor dimension, outermost first."""
    return tuple(mesh_dim for mesh_dim in layout.cut_by(dim) if layout.mesh.shape[mesh_dim] > 1)


def needs_redistribution(layout: Layout, items: Sequence[Item]) -> bool:
    """True if several mesh dimensions shard a dimension that the index does not take completely."""
    return any(len(sharded_over(layout, dim)) > 1 for dim in _partly_taken(layout.shape, [items]))


def indexing_strategy(input: Operand, items: Sequence[Item]) -> MeshStrategy:
    """Return the strategy of `x[items]`."""
    ins, outs, copied = _layouts(input, items, _partly_taken(input.shape, [items]))

    def run(context: LocalContext) -> Local:
        index, summed = _local_index(context.ins[0], context.ins[0].region(context.rank), items)
        if not summed:
            return lambda _, args, kwargs: first_tensor(args, kwargs)[index]
        if input.dtype == torch.bool:
            return lambda _, args, kwargs: first_tensor(args, kwargs)[index].any(summed)
        return lambda _, args, kwargs: first_tensor(args, kwargs)[index].sum(summed, dtype=input.dtype)

    return MeshStrategy((ins,), (outs,), run=run, fresh=False, copied=copied)


def slices_strategy(input: Operand, slices: Sequence[Sequence[Item]]) -> MeshStrategy:
    """Return the strategy of several slices of one tensor, returned as a tuple."""
    partly_taken = _partly_taken(input.shape, slices)
    layouts = [_layouts(input, items, partly_taken) for items in slices]

    def run(context: LocalContext) -> Local:
        region = context.ins[0].region(context.rank)
        indices = [_local_index(context.ins[0], region, items)[0] for items in slices]

        def local(_: Any, args: Any, kwargs: Any) -> Any:
            source = first_tensor(args, kwargs)
            return tuple(source[index] for index in indices)

        return local

    return MeshStrategy((layouts[0][0],), tuple(outs for _, outs, _ in layouts), run=run, fresh=False)


def _partly_taken(shape: Sequence[int], slices: Sequence[Sequence[Item]]) -> set[int]:
    """Return the dimensions that some index does not take completely."""
    partly_taken: set[int] = set()
    for items in slices:
        for dim, item in enumerate(item for item in items if item is not None):
            if not isinstance(item, slice) or len(range(*item.indices(shape[dim]))) != shape[dim]:
                partly_taken.add(dim)
    return partly_taken


def _layouts(input: Operand, items: Sequence[Item], partly_taken: set[int]) -> tuple[Layout, Layout, bool]:
    """Return the layout to index, the layout of the result, and whether the result cannot be a view."""
    source, mesh = input.layout, input.layout.mesh
    at = _items_by_dim(items)
    ins, outs = list(source.placements), list(source.placements)
    copied = False
    for mesh_dim in source.order:
        placement = source.placements[mesh_dim]
        if not isinstance(placement, Shard | Ragged):
            continue
        dim, ranks = placement.dim, mesh.shape[mesh_dim]
        item, out_dim = at[dim]
        sharding = sharded_over(source, dim) or source.cut_by(dim)
        if dim not in partly_taken:
            outs[mesh_dim] = Shard(out_dim) if isinstance(placement, Shard) else Ragged(out_dim, placement.sizes)
        elif mesh_dim != sharding[0] or (ranks == 1 and isinstance(item, int)):
            ins[mesh_dim] = outs[mesh_dim] = REPLICATE  # sharded more than once: keep only the outermost
        elif isinstance(item, int):
            outs[mesh_dim] = Partial("bor") if input.dtype == torch.bool else SUM
            copied = True
        else:
            outs[mesh_dim] = _overlaps(source, placement, ranks, item, out_dim)
    shape = torch.empty(source.shape, device="meta")[tuple(items)].shape
    return source.replace(placements=ins, order=source.order), Layout(mesh, outs, shape, source.order), copied


def _items_by_dim(items: Sequence[Item]) -> list[tuple[Item, int]]:
    """For every dimension of the tensor, return its item and its dimension in the result."""
    at: list[tuple[Item, int]] = []
    out_dim = 0
    for item in items:
        if item is not None:
            at.append((item, out_dim))
        out_dim += not isinstance(item, int)
    return at


def _overlaps(source: Layout, placement: Shard | Ragged, ranks: int, item: Item, out_dim: int) -> Placement:
    """Return the placement of a slice of a sharded dimension: every shard keeps its overlap."""
    assert isinstance(item, slice)
    extent = source.shape[placement.dim]
    sizes, start = [], 0
    for size in shard_sizes(extent, placement, ranks).tolist():
        sizes.append(len(range(*_within(item, start, size).indices(size))))
        start += size
    return sized_placement(out_dim, tuple(sizes), sum(sizes), ranks)


def _within(item: slice, offset: int, size: int) -> slice:
    """Return the part of a slice that overlaps a shard, relative to the start of the shard."""
    skipped = max(0, -(-(offset - item.start) // item.step))
    first = item.start + skipped * item.step - offset
    last = min(item.stop - offset, size)
    return slice(first, last, item.step) if first < last else slice(0, 0, 1)


def _local_index(layout: Layout, region: Region, items: Sequence[Item]) -> tuple[tuple[Item, ...], tuple[int, ...]]:
    """Return the index of the local tensor, and the dimensions of its result to sum over."""
    index: list[Item] = []
    summed: list[int] = []
    dim = out_dim = 0
    for item in items:
        if item is None:
            index.append(None)
        else:
            offset, size = region.offset[dim], region.size[dim]
            if not sharded_over(layout, dim):
                index.append(item)
            elif isinstance(item, int):
                index.append(_within(slice(item, item + 1, 1), offset, size))
                summed.append(out_dim)
            else:
                index.append(_within(item, offset, size))
            dim += 1
        out_dim += not isinstance(index[-1], int)
    return tuple(index), tuple(summed)
