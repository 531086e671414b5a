"""Views: permuted, split, joined, inserted and removed dimensions, on even and uneven shards."""

from __future__ import annotations

from dataclasses import replace
from math import prod
from typing import Any

import torch

from shardwright.layout import Layout, Placement, Ragged, Shard
from shardwright.tensor.base.gradient_types import REPLICATE
from shardwright.tensor.base.registry import composite, rule
from shardwright.tensor.base.strategy import (
    Labels,
    Local,
    LocalContext,
    MeshStrategy,
    Operand,
    Strategies,
    index_strategies,
)
from shardwright.tensor.dispatch.cache import mark_fast
from shardwright.tensor.rules.shared.shard_sizes import shard_sizes, sized_placement

__all__ = ["regroup"]


def _relabel(input: Operand, out: Labels) -> Strategies:
    return Strategies(index_strategies([input], [list(range(input.ndim))], [out], terms=[[0]]), fresh=False)


def _ints(values: Any) -> tuple[int, ...]:
    """Accept both `x.view(2, 3)` and `x.view((2, 3))`."""
    if len(values) == 1 and isinstance(values[0], list | tuple):
        values = values[0]
    return tuple(int(value) for value in values)


@rule("permute")
def _permute(input: Operand, *order: Any, dims: Any = None) -> Strategies:
    return _relabel(input, [input.dim(d) for d in _ints(order or dims)])


@rule("transpose")
def _transpose(input: Operand, dim0: int, dim1: int) -> Strategies:
    labels = list(range(input.ndim))
    if labels:
        a, b = input.dim(dim0), input.dim(dim1)
        labels[a], labels[b] = labels[b], labels[a]
    return _relabel(input, labels)


@rule("t", "adjoint")
def _t(input: Operand) -> Strategies:
    labels = list(range(input.ndim))
    return _relabel(input, [*labels[:-2], *reversed(labels[-2:])])


@rule("movedim")
def _movedim(input: Operand, source: Any, destination: Any) -> Strategies:
    sources = [input.dim(d) for d in ([source] if isinstance(source, int) else source)]
    destinations = [input.dim(d) for d in ([destination] if isinstance(destination, int) else destination)]
    rest = iter(d for d in range(input.ndim) if d not in sources)
    source_of = dict(zip(destinations, sources, strict=True))
    return _relabel(input, [source_of[d] if d in source_of else next(rest) for d in range(input.ndim)])


@rule("unsqueeze")
def _unsqueeze(input: Operand, dim: int) -> Strategies:
    labels: list[Any] = list(range(input.ndim))
    labels.insert(dim if dim >= 0 else dim + input.ndim + 1, None)
    return _relabel(input, labels)


@rule("squeeze")
def _squeeze(input: Operand, dim: Any = None) -> Strategies:
    named = range(input.ndim) if dim is None else [dim] if isinstance(dim, int) else dim
    dropped = {input.dim(d) for d in named if input.ndim and input.shape[input.dim(d)] == 1}
    ins: list[Any] = [None if d in dropped else d for d in range(input.ndim)]
    at = index_strategies([input], [ins], [[d for d in ins if d is not None]], terms=[[0]])

    def run(_: LocalContext) -> Local:
        # Explicit dimensions: one that is 1 only in this shard must stay.
        return lambda func, args, kwargs: args[0].squeeze(tuple(sorted(dropped)))

    return Strategies(at, run=run, fresh=False)


@rule("expand")
def _expand(input: Operand, *sizes: Any, size: Any = None, implicit: bool = False) -> Strategies:
    del implicit
    wanted = _ints(sizes or size)
    new = len(wanted) - input.ndim
    ins: list[Any] = [d if wanted[new + d] in (-1, size) else None for d, size in enumerate(input.shape)]
    out: list[Any] = [None] * new + [d if label is not None else None for d, label in enumerate(ins)]

    def run(context: LocalContext) -> Local:
        local = context.outs[0].local_shape(context.rank)
        return lambda func, args, kwargs: args[0].expand(local)

    return Strategies(index_strategies([input], [ins], [out], terms=[[0]]), run=run, fresh=False)


@composite("expand_as", "broadcast_to")
def _expand_as(input: Any, other: Any) -> Any:
    return input.expand(other.shape if isinstance(other, torch.Tensor) else other)


@composite("sum_to_size")
def _sum_to_size(input: Any, *size: Any) -> Any:
    """The inverse of expand."""
    wanted = _ints(size)
    new = input.ndim - len(wanted)
    if new < 0:
        return NotImplemented
    dims = [d for d, n in enumerate(input.shape) if d < new or (wanted[d - new] == 1 and n != 1)]
    if not dims:
        return input if tuple(input.shape) == wanted else NotImplemented
    return input.sum(dims, keepdim=True).reshape(wanted)


@composite("broadcast_tensors")
def _broadcast_tensors(*tensors: Any) -> Any:
    given = list(tensors[0]) if len(tensors) == 1 and isinstance(tensors[0], list | tuple) else list(tensors)
    shape = torch.broadcast_shapes(*(tensor.shape for tensor in given))  # type: ignore[no-untyped-call]  # untyped in torch
    return tuple(tensor.expand(shape) for tensor in given)


@rule("view", "reshape", "_unsafe_view")
def _view(
    input: Operand, *sizes: Any, shape: Any = None, size: Any = None, dtype: Any = None
) -> MeshStrategy | Strategies | None:
    if dtype is not None or (len(sizes) == 1 and isinstance(sizes[0], torch.dtype)):
        return _view_dtype(input, dtype or sizes[0])
    wanted = sizes or (shape if shape is not None else size)
    return regroup(input, _resolve(_ints(wanted), input.shape))


def _view_dtype(input: Operand, dtype: torch.dtype) -> Strategies | None:
    """The last dimension changes its size, so it is replicated unless the item size stays."""
    labels: list[Any] = list(range(input.ndim))
    if dtype.itemsize != input.dtype.itemsize and labels:
        labels[-1] = None
    return Strategies(index_strategies([input], [labels], [labels]), fresh=False)


@rule("flatten")
def _flatten(input: Operand, start_dim: int = 0, end_dim: int = -1) -> MeshStrategy:
    if not input.ndim:
        return regroup(input, (1,))
    first, last = input.dim(start_dim), input.dim(end_dim)
    if first == last:  # torch returns the input object itself
        return _unchanged(input, lambda func, args, kwargs: args[0])
    return regroup(input, (*input.shape[:first], prod(input.shape[first : last + 1]), *input.shape[last + 1 :]))


@rule("unflatten")
def _unflatten(input: Operand, dim: int, sizes: Any) -> MeshStrategy:
    axis = input.dim(dim)
    inner = _resolve(tuple(sizes), (input.shape[axis],))
    return regroup(input, (*input.shape[:axis], *inner, *input.shape[axis + 1 :]))


@rule("ravel")
def _ravel(input: Operand) -> MeshStrategy:
    return regroup(input, (prod(input.shape),))


@composite("view_as", "reshape_as")
def _view_as(input: Any, other: Any) -> Any:
    return input.reshape(other.shape) if tuple(input.shape) != tuple(other.shape) else NotImplemented


@rule("view_as", "reshape_as")
def _alias(input: Operand, other: Operand) -> MeshStrategy | None:
    """An alias if the shapes are equal, whatever the layout of `other`."""
    if input.shape != other.shape:
        return None
    return MeshStrategy(
        (input.layout, other.layout),
        (input.layout,),
        run=lambda _: lambda func, args, kwargs: args[0].view_as(args[0]),
        fresh=False,
    )


def _resolve(shape: tuple[int, ...], old: tuple[int, ...]) -> tuple[int, ...]:
    if shape.count(-1) != 1:
        return shape
    known, total = prod(size for size in shape if size != -1), prod(old)
    if known == 0 or total % known:
        return shape  # torch raises the error
    return tuple(total // known if size == -1 else size for size in shape)


def _unchanged(input: Operand, run: Local) -> MeshStrategy:
    """Return the strategy of a call that keeps the shape: no redistribution, whatever the layout."""
    return MeshStrategy((input.layout,), (input.layout,), run=lambda _: run, fresh=False)


def regroup(input: Operand, shape: tuple[int, ...]) -> MeshStrategy:
    """Return the strategy of a view: in a group of joined or split dimensions, the leading one may be sharded.

    Shards of another dimension are exchanged for shards of a leading one, if one is free. If several mesh dimensions
    shard a dimension, the outermost stay, as many as fit; a tensor is never gathered from more ranks than necessary.
    """
    if shape == input.shape:
        return _unchanged(input, lambda func, args, kwargs: args[0].view_as(args[0]))
    torch.empty(input.shape, device="meta").view(shape)  # torch's own check, with global sizes, on every rank
    leading = _leading_dims(input.shape, shape)
    source = input.layout
    placements_in: list[Placement] = list(source.placements)
    placements_out: list[Placement] = list(source.placements)
    taken = {dim for dim in range(input.ndim) if source.cut_by(dim)}
    for mesh_dim in source.order:
        placement = source.placements[mesh_dim]
        if not isinstance(placement, Shard | Ragged):
            continue
        sharding = source.cut_by(placement.dim)
        if placement.dim not in leading:
            free = [d for d in leading if d < placement.dim and d not in taken]
            if free:
                taken.add(max(free))
                fitted = _fit(source, mesh_dim, Shard(max(free)), leading, shape)
            else:
                fitted = _elsewhere(source, mesh_dim, leading, shape, taken)
        elif len(sharding) == 1:
            fitted = _fit(source, mesh_dim, placement, leading, shape)
        else:
            fitted = _fit_nested(source, mesh_dim, placement, leading, shape, taken)
        placements_in[mesh_dim], placements_out[mesh_dim] = fitted
    ins = source.replace(placements=placements_in, order=source.order)
    outs = Layout(source.mesh, placements_out, shape, source.order)

    def run(context: LocalContext) -> Local:
        local = context.outs[0].local_shape(context.rank)
        return lambda func, args, kwargs: args[0].view(local) if func.__name__ == "view" else args[0].reshape(local)

    return MeshStrategy((ins,), (outs,), run=run, fresh=False)


def _leading_dims(old: tuple[int, ...], new: tuple[int, ...]) -> dict[int, tuple[int, int, int]]:
    """For each old dimension that may be sharded, return the new one and the elements per index of both."""
    leading: dict[int, tuple[int, int, int]] = {}
    if 0 in old:
        return {}
    i = j = 0
    while i < len(old) and j < len(new):
        first, second, a, b = i, j, old[i], new[j]
        while a != b:
            if a < b:
                i += 1
                a *= old[i]
            else:
                j += 1
                b *= new[j]
        # Leading ones do not count: the group starts at the first dimension that is larger.
        while first < i and old[first] == 1:
            first += 1
        while second < j and new[second] == 1:
            second += 1
        leading[first] = (second, prod(old[first + 1 : i + 1]), prod(new[second + 1 : j + 1]))
        i, j = i + 1, j + 1
    return leading


def _fit_nested(
    source: Layout,
    mesh_dim: int,
    placement: Shard | Ragged,
    leading: dict[int, tuple[int, int, int]],
    shape: tuple[int, ...],
    taken: set[int],
) -> tuple[Placement, Placement]:
    """Return the placements for one of several mesh dimensions that shard a dimension, outermost first."""
    dim, old_step, new_step = leading[placement.dim]
    sharding = source.cut_by(placement.dim)
    if shape[dim] == source.shape[placement.dim] and old_step == new_step:
        return placement, replace(placement, dim=dim)
    kept = next((n for n in range(len(sharding), 1, -1) if _divide(source, sharding[:n], placement.dim, shape[dim])), 1)
    position = sharding.index(mesh_dim)
    if position < kept:
        return (placement, Shard(dim)) if kept > 1 else _fit(source, mesh_dim, placement, leading, shape)
    return _elsewhere(source, mesh_dim, leading, shape, taken)


def _elsewhere(
    source: Layout,
    mesh_dim: int,
    leading: dict[int, tuple[int, int, int]],
    shape: tuple[int, ...],
    taken: set[int],
) -> tuple[Placement, Placement]:
    """Return placements that shard the longest free dimension that divides evenly, or replicate."""
    ranks = source.mesh.shape[mesh_dim]
    free = [d for d in leading if d not in taken and not source.shape[d] % ranks and not shape[leading[d][0]] % ranks]
    if not free:
        return REPLICATE, REPLICATE
    longest = max(free, key=lambda d: source.shape[d])
    taken.add(longest)
    return Shard(longest), Shard(leading[longest][0])


def _divide(source: Layout, sharding: tuple[int, ...], dim: int, size: int) -> bool:
    """True if these mesh dimensions divide both the old dimension and the new one evenly."""
    count = prod(source.mesh.shape[m] for m in sharding)
    even = all(isinstance(source.placements[m], Shard) for m in sharding)
    return even and not source.shape[dim] % count and not size % count


def _fit(
    source: Layout,
    mesh_dim: int,
    placement: Shard | Ragged,
    leading: dict[int, tuple[int, int, int]],
    shape: tuple[int, ...],
) -> tuple[Placement, Placement]:
    """Return the placements for a mesh dimension that shards alone, with the least redistribution."""
    if placement.dim not in leading:
        return REPLICATE, REPLICATE
    dim, old_step, new_step = leading[placement.dim]
    # Elements per shard of the group.
    ranks = source.mesh.shape[mesh_dim]
    elements = shard_sizes(source.shape[placement.dim], placement, ranks) * old_step
    if not (elements % new_step).any():
        return placement, sized_placement(dim, tuple((elements // new_step).tolist()), shape[dim], ranks)
    # Reshard so that shards hold complete indices of the new dimension: neighbours exchange a little.
    wanted = shard_sizes(shape[dim], Shard(dim), ranks) * new_step
    if not (wanted % old_step).any():
        sizes = tuple((wanted // old_step).tolist())
        return sized_placement(placement.dim, sizes, source.shape[placement.dim], ranks), Shard(dim)
    return REPLICATE, REPLICATE


mark_fast("view", "transpose", "permute", "t", "unsqueeze", "expand")
