"""Slices and single places of a tensor, taken from shards where they are: every rank keeps its overlap, as a view.

A slice of a cut dimension is cut unevenly (`Ragged`), and nothing moves. A single place of a cut dimension lives on
one rank: the others hold zeros, and the result is a sum of which all addends but one are zero.
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
from shardwright.tensor.rules.shared.piece_sizes import evenly, piece_sizes

__all__ = ["Item", "cutting", "first_tensor", "moves", "pick", "pick_each", "resolved"]

Item: TypeAlias = int | slice | None  # resolved: a place from the start, a slice of three numbers, a new dimension


def first_tensor(args: Sequence[Any], kwargs: dict[str, Any]) -> Tensor:
    """The first tensor of a call, which may have been given by its name."""
    return args[0] if args else next(tensors_in(kwargs.values()))


def resolved(index: Any, shape: Sequence[int]) -> tuple[Item, ...]:
    """A basic index (numbers, slices, None, Ellipsis) with an item for every dimension, and no negative numbers."""
    given = index if isinstance(index, tuple) else (index,)
    used = sum(item is not None and item is not Ellipsis for item in given)
    rest = (slice(None),) * (len(shape) - used)
    if Ellipsis in given:
        place = given.index(Ellipsis)
        given = (*given[:place], *rest, *(item for item in given[place + 1 :] if item is not Ellipsis))
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


def cutting(layout: Layout, dim: int) -> tuple[int, ...]:
    """The mesh dimensions of more than one rank that cut a tensor dimension, first cut first."""
    return tuple(mesh_dim for mesh_dim in layout.cut_by(dim) if layout.mesh.shape[mesh_dim] > 1)


def moves(layout: Layout, items: Sequence[Item]) -> bool:
    """Whether anything must move: several mesh dimensions cut a dimension of which not all is picked."""
    return any(len(cutting(layout, dim)) > 1 for dim in _touched(layout.shape, [items]))


def pick(input: Operand, items: Sequence[Item]) -> MeshStrategy:
    """One pick of a tensor."""
    ins, outs, copied = _placed(input, items, _touched(input.shape, [items]))

    def run(context: LocalContext) -> Local:
        index, summed = _locally(context.ins[0], context.ins[0].region(context.rank), items)
        if not summed:
            return lambda _, args, kwargs: first_tensor(args, kwargs)[index]
        if input.dtype == torch.bool:
            return lambda _, args, kwargs: first_tensor(args, kwargs)[index].any(summed)
        return lambda _, args, kwargs: first_tensor(args, kwargs)[index].sum(summed, dtype=input.dtype)

    return MeshStrategy((ins,), (outs,), run=run, fresh=False, copied=copied)


def pick_each(input: Operand, picks: Sequence[Sequence[Item]]) -> MeshStrategy:
    """Several picks of one tensor, as a tuple; of slices only."""
    touched = _touched(input.shape, picks)
    placed = [_placed(input, items, touched) for items in picks]

    def run(context: LocalContext) -> Local:
        region = context.ins[0].region(context.rank)
        indices = [_locally(context.ins[0], region, items)[0] for items in picks]

        def local(_: Any, args: Any, kwargs: Any) -> Any:
            source = first_tensor(args, kwargs)
            return tuple(source[index] for index in indices)

        return local

    return MeshStrategy((placed[0][0],), tuple(outs for _, outs, _ in placed), run=run, fresh=False)


def _touched(shape: Sequence[int], picks: Sequence[Sequence[Item]]) -> set[int]:
    """The dimensions of which some pick leaves something out."""
    touched: set[int] = set()
    for items in picks:
        for dim, item in enumerate(item for item in items if item is not None):
            if not isinstance(item, slice) or len(range(*item.indices(shape[dim]))) != shape[dim]:
                touched.add(dim)
    return touched


def _placed(input: Operand, items: Sequence[Item], touched: set[int]) -> tuple[Layout, Layout, bool]:
    """The layout to pick from, that of the pick, and whether the pick cannot be a view."""
    source, mesh = input.layout, input.layout.mesh
    at = _picked_dims(items)
    ins, outs = list(source.placements), list(source.placements)
    copied = False
    for mesh_dim in source.order:
        placement = source.placements[mesh_dim]
        if not isinstance(placement, Shard | Ragged):
            continue
        dim, ranks = placement.dim, mesh.shape[mesh_dim]
        item, out_dim = at[dim]
        cuts = cutting(source, dim) or source.cut_by(dim)
        if dim not in touched:
            outs[mesh_dim] = Shard(out_dim) if isinstance(placement, Shard) else Ragged(out_dim, placement.sizes)
        elif mesh_dim != cuts[0] or (ranks == 1 and isinstance(item, int)):
            ins[mesh_dim] = outs[mesh_dim] = REPLICATE  # cut several times over: brought together for all but the first
        elif isinstance(item, int):
            outs[mesh_dim] = Partial("bor") if input.dtype == torch.bool else SUM
            copied = True
        else:
            outs[mesh_dim] = _overlaps(source, placement, ranks, item, out_dim)
    shape = torch.empty(source.shape, device="meta")[tuple(items)].shape
    return source.replace(placements=ins, order=source.order), Layout(mesh, outs, shape, source.order), copied


def _picked_dims(items: Sequence[Item]) -> list[tuple[Item, int]]:
    """For every dimension of the tensor: what is picked of it, and the dimension of the result that it becomes."""
    at: list[tuple[Item, int]] = []
    out_dim = 0
    for item in items:
        if item is not None:
            at.append((item, out_dim))
        out_dim += not isinstance(item, int)
    return at


def _overlaps(source: Layout, placement: Shard | Ragged, ranks: int, item: Item, out_dim: int) -> Placement:
    """How a slice of a cut dimension is cut: into what each piece has of it."""
    assert isinstance(item, slice)
    extent = source.shape[placement.dim]
    sizes, start = [], 0
    for size in piece_sizes(extent, placement, ranks).tolist():
        sizes.append(len(range(*_within(item, start, size).indices(size))))
        start += size
    return evenly(out_dim, tuple(sizes), sum(sizes), ranks)


def _within(item: slice, offset: int, size: int) -> slice:
    """The part of a slice that lies in a piece, counted from the start of the piece."""
    skipped = max(0, -(-(offset - item.start) // item.step))
    first = item.start + skipped * item.step - offset
    last = min(item.stop - offset, size)
    return slice(first, last, item.step) if first < last else slice(0, 0, 1)


def _locally(layout: Layout, region: Region, items: Sequence[Item]) -> tuple[tuple[Item, ...], tuple[int, ...]]:
    """The index of the local tensor, and the dimensions of what it gives that are summed away."""
    index: list[Item] = []
    summed: list[int] = []
    dim = out_dim = 0
    for item in items:
        if item is None:
            index.append(None)
        else:
            offset, size = region.offset[dim], region.size[dim]
            if not cutting(layout, dim):
                index.append(item)
            elif isinstance(item, int):
                index.append(_within(slice(item, item + 1, 1), offset, size))
                summed.append(out_dim)
            else:
                index.append(_within(item, offset, size))
            dim += 1
        out_dim += not isinstance(index[-1], int)
    return tuple(index), tuple(summed)
