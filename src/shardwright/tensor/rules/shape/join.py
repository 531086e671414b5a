"""Joins along an existing dimension (`cat`) or a new one (`stack`), and `meshgrid`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from shardwright.layout import Placement, Shard
from shardwright.tensor.base.registry import composite, rule
from shardwright.tensor.base.strategy import Label, Operand, Strategies, Strategy, index_strategies
from shardwright.tensor.rules.shared.basic_index import sharded_over
from shardwright.tensor.rules.shared.neighbourhood import skip_empty
from shardwright.tensor.rules.shared.shard_sizes import shard_sizes, sized_placement

__all__: list[str] = []


@rule("cat")
def _cat(tensors: Sequence[Operand], dim: Any = 0, *, axis: int | None = None) -> Strategies | None:
    full = [tensor for tensor in tensors if tensor.shape != (0,)]  # torch skips tensors of shape (0,)
    if not full or not all(isinstance(tensor, Operand) for tensor in tensors):
        return None
    position = full[0].dim(dim if axis is None else axis)
    labels: list[Label] = [None if d == position and len(full) > 1 else d for d in range(full[0].ndim)]
    ins = [labels if tensor in full else [None] for tensor in tensors]
    terms = [[i] for i in range(len(tensors))]
    at = index_strategies(tensors, ins, [labels], terms=terms, reduction=None)
    return Strategies(_with_sharded_join(position, tensors, at) if len(full) == len(tensors) else at)


def _with_sharded_join(
    dim: int, tensors: Sequence[Operand], at: Callable[[int], list[Strategy]]
) -> Callable[[int], list[Strategy]]:
    """Add a strategy that joins along a sharded dimension: each rank receives the inputs of its share of the result."""
    sharding = {mesh_dim for tensor in tensors for mesh_dim in sharded_over(tensor.layout, dim)}
    if len(sharding) != 1:
        return at
    ranks = tensors[0].layout.mesh.shape[next(iter(sharding))]
    sizes = [tensor.shape[dim] for tensor in tensors]
    shares = shard_sizes(sum(sizes), Shard(dim), ranks).tolist()
    ins: list[Placement] = []
    before = 0
    for size in sizes:
        own, start = [], 0
        for share in shares:
            own.append(max(0, min(start + share, before + size) - max(start, before)))
            start += share
        ins.append(sized_placement(dim, tuple(own), size, ranks))
        before += size
    along = Strategy(tuple(ins), (Shard(dim),))

    def extended(mesh_dim: int) -> list[Strategy]:
        return [along, *at(mesh_dim)] if mesh_dim in sharding else at(mesh_dim)

    return extended


@rule("stack")
def _stack(tensors: Sequence[Operand], dim: int = 0) -> Strategies | None:
    if not tensors or not all(isinstance(tensor, Operand) for tensor in tensors):
        return None
    labels = list(range(tensors[0].ndim))
    out: list[Label] = [*labels]
    out.insert(dim if dim >= 0 else dim + len(labels) + 1, None)
    return Strategies(
        index_strategies(tensors, [labels] * len(tensors), [out], terms=[[i] for i in range(len(tensors))])
    )


def _at_least(tensor: Any, ndim: int) -> Any:
    """As torch.atleast_1d, 2d and 3d."""
    shape = tuple(tensor.shape)
    if len(shape) >= ndim:
        return tensor
    wanted = {1: (1,), 2: (1, *shape) if shape else (1, 1), 3: (1, *shape, 1) if len(shape) < 2 else (*shape, 1)}[ndim]
    return tensor.reshape(wanted if shape else (1,) * ndim)


def _atleast(ndim: int) -> Callable[..., Any]:
    def compose(*tensors: Any) -> Any:
        if len(tensors) == 1 and isinstance(tensors[0], list | tuple):
            tensors = tuple(tensors[0])
        elif len(tensors) == 1:
            return _at_least(tensors[0], ndim)
        return tuple(_at_least(tensor, ndim) for tensor in tensors)

    return compose


for _ndim in (1, 2, 3):
    composite(f"atleast_{_ndim}d")(_atleast(_ndim))


@composite("hstack")
def _hstack(tensors: Any) -> Any:
    tensors_1d = [_at_least(tensor, 1) for tensor in tensors]
    return torch.cat(tensors_1d, 0 if tensors_1d[0].ndim == 1 else 1)


@composite("vstack", "row_stack")
def _vstack(tensors: Any) -> Any:
    return torch.cat([_at_least(tensor, 2) for tensor in tensors], 0)


@composite("dstack")
def _dstack(tensors: Any) -> Any:
    return torch.cat([_at_least(tensor, 3) for tensor in tensors], 2)


@composite("column_stack")
def _column_stack(tensors: Any) -> Any:
    columns = [tensor if tensor.ndim > 1 else tensor.reshape(tensor.numel(), 1) for tensor in tensors]
    return torch.cat(columns, 1)


@rule("_chunk_cat")
def _chunk_cat(tensors: Sequence[Operand], dim: int, num_chunks: int) -> Strategies | None:
    """Dimensions before the chunked one are independent."""
    del num_chunks
    if not tensors or not all(isinstance(tensor, Operand) for tensor in tensors):
        return None
    lead: list[Label] = list(range(dim))
    ins = [[*lead, *[None] * (tensor.ndim - dim)] for tensor in tensors]
    terms = [[i] for i in range(len(tensors))]
    at = index_strategies(tensors, ins, [[*lead, None, None]], terms=terms, reduction=None)
    return Strategies(at, run=skip_empty)


@composite("meshgrid")
def _meshgrid(*tensors: Any, indexing: str = "ij") -> Any:
    given = list(tensors[0]) if len(tensors) == 1 and isinstance(tensors[0], list | tuple) else list(tensors)
    if indexing not in ("ij", "xy") or any(tensor.ndim > 1 for tensor in given):
        return NotImplemented
    swapped = indexing == "xy" and len(given) > 1
    order = [1, 0, *range(2, len(given))] if swapped else list(range(len(given)))
    sizes = [given[index].numel() for index in order]
    grids = []
    for index, tensor in enumerate(given):
        ones = [1] * len(given)
        ones[order[index]] = tensor.numel()
        grids.append(tensor.reshape(ones).expand(sizes))
    return tuple(grids)
