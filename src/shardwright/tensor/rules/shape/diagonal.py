"""Triangles and diagonals of matrices."""

from __future__ import annotations

from typing import Any

import torch

from shardwright.layout import Ragged, Region, Shard
from shardwright.tensor.base.registry import composite, rule
from shardwright.tensor.base.strategy import Label, Local, LocalContext, Operand, Strategies, Strategy, index_strategies
from shardwright.tensor.rules.shared.basic_index import first_tensor, sharded_over
from shardwright.tensor.rules.shared.shard_sizes import shard_sizes, sized_placement

__all__ = ["diagonal_in_region"]


@rule("tril", "triu")
def _triangle(input: Operand, diagonal: int = 0) -> Strategies:
    """The diagonal of a shard is the global one, shifted by the offset of the shard."""

    def run(context: LocalContext) -> Local:
        row, column = context.ins[0].region(context.rank).offset[-2:]
        return lambda func, args, kwargs: func(first_tensor(args, kwargs), diagonal + row - column)

    labels = list(range(input.ndim))
    return Strategies(index_strategies([input], [labels], [labels], terms=[[0]]), run=run if input.ndim > 1 else None)


def diagonal_in_region(region: Region, row: int, column: int, offset: int) -> tuple[int, int, int]:
    """Return the part of a diagonal in a region: its first element, their number, and the diagonal's offset there."""
    down, right = max(0, -offset), max(0, offset)
    top, left = region.offset[row] - down, region.offset[column] - right
    first = max(0, top, left)
    count = min(top + region.size[row], left + region.size[column]) - first
    return first, max(0, count), offset + region.offset[row] - region.offset[column]


def _diagonal_strategies(input: Operand, offset: int, dim1: int, dim2: int) -> Strategies:
    """The diagonal of a sharded matrix is sharded unevenly; every rank has its part as a view."""
    row, column = input.dim(dim1), input.dim(dim2)
    labels: list[Label] = [None if d in (row, column) else d for d in range(input.ndim)]
    out = [label for label in labels if label is not None]
    at = index_strategies([input], [labels], [[*out, None]], terms=[[0]], reduction=None)

    def extended(mesh_dim: int) -> list[Strategy]:
        placement, layout = input.layout.placements[mesh_dim], input.layout
        sharding = (*sharded_over(layout, row), *sharded_over(layout, column))
        if not isinstance(placement, Shard | Ragged) or sharding[:1] != (mesh_dim,):
            return at(mesh_dim)
        if len(sharded_over(layout, placement.dim)) > 1:
            return at(mesh_dim)  # a diagonal is sharded only once
        ranks = layout.mesh.shape[mesh_dim]
        sizes, start = [], 0
        for size in shard_sizes(input.shape[placement.dim], placement, ranks).tolist():
            corner = [start if d == placement.dim else 0 for d in range(input.ndim)]
            extent = [size if d == placement.dim else full for d, full in enumerate(input.shape)]
            sizes.append(diagonal_in_region(Region(corner, extent), row, column, offset)[1])
            start += size
        return [*at(mesh_dim), Strategy((placement,), (sized_placement(len(out), tuple(sizes), sum(sizes), ranks),))]

    def run(context: LocalContext) -> Local:
        shifted = diagonal_in_region(context.ins[0].region(context.rank), row, column, offset)[2]
        return lambda _, args, kwargs: first_tensor(args, kwargs).diagonal(shifted, row, column)

    return Strategies(extended, run=run, fresh=False)


@rule("diagonal")
def _diagonal(input: Operand, offset: int = 0, dim1: int = 0, dim2: int = 1) -> Strategies:
    return _diagonal_strategies(input, offset, dim1, dim2)


@rule("linalg_diagonal")
def _linalg_diagonal(A: Operand, *, offset: int = 0, dim1: int = -2, dim2: int = -1) -> Strategies:  # noqa: N803  # torch's name
    return _diagonal_strategies(A, offset, dim1, dim2)


@rule("diag_embed")
def _diag_embed(input: Operand, offset: int = 0, dim1: int = -2, dim2: int = -1) -> Strategies:
    """Sharded elements give sharded rows; the first and last shard also hold the rows beyond the diagonal."""
    row, column = dim1 % (input.ndim + 1), dim2 % (input.ndim + 1)
    rest = iter(range(input.ndim))
    out: list[Label] = [None if d in (row, column) else next(rest) for d in range(input.ndim + 1)]
    last = input.ndim - 1
    at = index_strategies([input], [[*range(last), None]], [out], terms=[[0]], reduction=None)
    above, below = max(0, -offset), max(0, offset)

    def extended(mesh_dim: int) -> list[Strategy]:
        placement, layout = input.layout.placements[mesh_dim], input.layout
        if not isinstance(placement, Shard | Ragged) or sharded_over(layout, last) != (mesh_dim,):
            return at(mesh_dim)
        ranks = layout.mesh.shape[mesh_dim]
        sizes = shard_sizes(input.shape[last], placement, ranks).tolist()
        sizes = [sizes[0] + above, *sizes[1:-1], sizes[-1] + below]
        return [*at(mesh_dim), Strategy((placement,), (sized_placement(row, tuple(sizes), sum(sizes), ranks),))]

    def run(context: LocalContext) -> Local | None:
        layout = context.ins[0]
        if not sharded_over(layout, last):
            return None
        mesh_dim = sharded_over(layout, last)[0]
        here, region = layout.mesh.coordinate(context.rank)[mesh_dim], layout.region(context.rank)
        left = region.offset[last] + below
        right = input.shape[last] + abs(offset) - left - region.size[last]
        top = above if here == 0 else 0
        bottom = below if here == layout.mesh.shape[mesh_dim] - 1 else 0

        def local(_: Any, args: Any, kwargs: dict[str, Any]) -> Any:
            square = first_tensor(args, kwargs).diag_embed()
            rows = torch.constant_pad_nd(square, (left, right, top, bottom))
            return rows.movedim((-2, -1), (row, column)).contiguous()

        return local

    return Strategies(extended, run=run)


@composite("diag")
def _diag(input: Any, diagonal: int = 0) -> Any:
    if input.ndim == 1:
        return input.diag_embed(diagonal)
    return torch.diagonal_copy(input, diagonal) if input.ndim == 2 else NotImplemented


@composite("diagflat")
def _diagflat(input: Any, offset: int = 0) -> Any:
    return input.flatten().diag_embed(offset)


@composite("trace")
def _trace(input: Any) -> Any:
    return input.diagonal().sum() if input.ndim == 2 else NotImplemented
