"""Samples of views, lookups and indexed writes: sizes that 3 ranks do not divide, fewer rows than ranks, zero rows."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

Sample = tuple[Callable[..., Any], tuple[Any, ...], dict[str, Any]]
SAMPLES: dict[str, list[Sample]] = {}


def add(name: str, func: Callable[..., Any], *args: Any, **kwargs: Any) -> None:
    SAMPLES.setdefault(name, []).append((func, args, kwargs))


def r(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed + sum(shape)))


def count(*shape: int, high: int) -> Tensor:
    return torch.randint(high, shape, generator=torch.Generator().manual_seed(high + sum(shape)))


T = torch.Tensor
aten = torch.ops.aten

# Lookups: in sharded tensors they give a partial sum; of bool tensors, a partial "or".
add("gather", torch.gather, r(5, 4), 0, count(3, 4, high=5))
add("gather", torch.gather, r(2, 4), -1, count(2, 7, high=4))
add("gather", torch.gather, r(5, 2) > 0, 0, count(3, 2, high=5))
add("gather", torch.gather, r(5, 2, 1), 0, count(3, 1, 1, high=5))
add("gather", torch.gather, r(0, 4), 1, count(0, 2, high=4))
add("gather", torch.gather, r(4), 0, torch.tensor(2))
add("gather", torch.gather, torch.tensor(2.0, dtype=torch.float64), 0, torch.zeros(4, dtype=torch.long))
add("index_select", torch.index_select, r(5, 4), 0, count(7, high=5))
add("index_select", torch.index_select, r(2, 4), 1, count(0, high=4))
add("index_select", torch.index_select, r(4), 0, torch.tensor(2))
add("__getitem__", T.__getitem__, r(5, 4), count(7, high=5) - 5)
add("__getitem__", T.__getitem__, r(5, 4), (count(3, 1, high=5), count(2, high=4) - 4))
add("__getitem__", T.__getitem__, r(2, 4, 5), (count(3, high=2), slice(None), count(3, high=5)))
add("__getitem__", T.__getitem__, r(4, 5) > 0, (slice(None), count(3, 2, high=5)))

# Writes: to a sharded target, of sharded values, and both.
indices = torch.tensor([[0], [3], [1]])
add("scatter", torch.scatter, r(5, 4), 0, indices.expand(3, 4), r(3, 4))
add("scatter", torch.scatter, r(5, 4), 0, indices.expand(3, 4), 1.5)
add("scatter", torch.scatter, r(5, 4), 0, count(3, 4, high=5), 1.5, reduce="multiply")
add("scatter", T.scatter_, r(5, 2), 0, indices.expand(3, 2), r(3, 2))
add("scatter_add", torch.scatter_add, r(5, 4), 0, count(3, 4, high=5), r(3, 4))
add("scatter_add", torch.scatter_add, r(5, 4), 1, count(5, 7, high=4), r(5, 7))
add("scatter_add", T.scatter_add_, r(5, 2), 0, count(3, 2, high=5), r(3, 2))
for how in ("sum", "prod", "mean", "amax", "amin"):
    add("scatter_reduce", torch.scatter_reduce, r(5, 4), 0, count(3, 4, high=5), r(3, 4), how)
    add("scatter_reduce", torch.scatter_reduce, r(5, 2), 0, count(7, 2, high=5), r(7, 2), how, include_self=False)
    if how != "sum":
        add("index_reduce", torch.index_reduce, r(5, 4), 0, count(3, high=5), r(3, 4), how)
add("index_add", torch.index_add, r(5, 4), 0, count(3, high=5), r(3, 4))
add("index_add", T.index_add_, r(5, 4), 1, count(3, high=4), r(5, 3), alpha=2)
add("index_copy", torch.index_copy, r(5, 4), 0, torch.tensor([3, 0]), r(2, 4))
add("index_copy", T.index_copy_, r(5, 2), 0, torch.tensor([3, 0]), r(2, 2))
add("index_fill", torch.index_fill, r(5, 4), 0, torch.tensor([-1, 0]), 2.0)
add("index_fill", torch.index_fill, r(5, 4), 0, torch.tensor([3, 0]), torch.tensor(2.0, dtype=torch.float64))
add("index_put", torch.index_put, r(5, 4), (torch.tensor([3, 0, -1]),), r(3, 4))
add("index_put", torch.index_put, r(5, 4), (torch.tensor([3, 0, -1]), torch.tensor([1, 2, 2])), r(3))
add("index_put", torch.index_put, r(5, 4), (torch.tensor([3, 0, 3]),), r(3, 4), True)
add("index_put", torch.index_put, r(5, 4), (torch.tensor([3, 0, 3]), torch.tensor([[0], [1]])), r(3), accumulate=True)
add("index_put", torch.index_put, r(5, 4), (torch.tensor([3, 0, 3]),), r(1), True)
add("index_put", aten.index_put, r(5, 4), (None, torch.tensor([3, 0])), r(5, 2))
add("index_put", T.index_put_, r(5, 4), (torch.tensor([3, 0]),), r(4))

# Views replaced by *_scatter.
add("select_scatter", torch.select_scatter, r(5, 4), r(4), 0, -2)
add("select_scatter", torch.select_scatter, r(4, 2), r(4), 1, 0)
for start, end, step in ((1, 4, 1), (None, None, 2), (-2, None, 1), (3, 3, 1), (0, 1, 3)):
    rows = len(range(*slice(start, end, step).indices(5)))
    add("slice_scatter", torch.slice_scatter, r(5, 2), r(rows, 2), 0, start, end, step)
add("slice_scatter", torch.slice_scatter, r(2, 4), r(2, 2), dim=1, start=1, end=3)
for offset in (0, 1, -3):
    length = torch.diagonal(r(5, 4), offset).numel()
    add("diagonal_scatter", torch.diagonal_scatter, r(5, 4), r(length), offset)
    add(
        "diagonal_scatter",
        torch.diagonal_scatter,
        r(4, 2, 5),
        r(2, torch.diagonal(r(5, 4), offset).numel()),
        offset,
        2,
        0,
    )
    add("diagonal", torch.diagonal, r(5, 4), offset)
    add("diagonal", torch.diagonal, r(4, 2, 5), offset, 2, 0)
    add("diag_embed", torch.diag_embed, r(4), offset)
    add("diag_embed", torch.diag_embed, r(2, 5), offset, 0, 2)
    add("diag_embed", torch.diag_embed, r(5, 1), offset, dim1=2, dim2=0)
add("diag_embed", torch.diag_embed, r(2, 0))
add("linalg_diagonal", torch.linalg.diagonal, r(2, 5, 4), offset=-1)
add("as_strided_scatter", torch.as_strided_scatter, r(5, 4), r(2, 2), (2, 2), (4, 1), 1)
add("as_strided", torch.as_strided, r(5, 4), (2, 3), (1, 2), 1)
add("slice", aten.slice, r(5, 4), 0, 1, 4)
add("slice", aten.slice, r(5, 4), 1, 0, 9, 3)

# Others.
add("_chunk_cat", torch._chunk_cat, [r(4, 5), r(4, 2)], 1, 2)
add("_chunk_cat", torch._chunk_cat, [r(5), r(2, 2)], 0, 3)
add("masked_scatter", T.masked_scatter, r(4, 2), r(4, 2) > 0, r(8))
add("masked_scatter", T.masked_scatter, r(4, 2), r(2) > 0, r(9))
add("masked_scatter", T.masked_scatter_, r(5), r(5) > 0, r(5))
add("roll", torch.roll, r(5, 4), 2, 0)
add("roll", torch.roll, r(5, 4), -3)
add("flip", torch.flip, r(5, 4), (0,))
add("rot90", torch.rot90, r(4, 5, 2), 3, (0, 2))
add("unfold", T.unfold, r(5, 4), 0, 2, 1)
add("unfold", T.unfold, r(5, 4), 1, 3, 2)
add("unfold", T.unfold, torch.tensor(2.0, dtype=torch.float64), 0, 1, 1)
