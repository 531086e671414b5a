"""Norms of every order: a local call along replicated dimensions; sums of powers or extremes along sharded ones."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from shardwright.tensor.base.registry import composite, rule
from shardwright.tensor.base.strategy import Label, Operand, Strategies, index_strategies
from shardwright.tensor.rules.reduction.reduce import is_sharded, reduced_dims, reduction_labels

__all__: list[str] = []

INF = float("inf")
SUMS = (0, 1)  # orders whose norm is a sum over the elements


@rule("linalg_vector_norm")
def _vector_norm(x: Operand, ord: Any = 2, dim: Any = None, keepdim: bool = False, *, dtype: Any = None) -> Strategies:
    del dtype
    dims = reduced_dims(x, dim)
    ins, out = reduction_labels(x, dims, keepdim)
    if ord in SUMS and x.dtype.itemsize > 2:  # half precision is summed in a wider dtype
        return Strategies(index_strategies([x], [ins], [out]))
    return Strategies(index_strategies([x], [ins], [out], reduction=None))


@composite("linalg_vector_norm")
def _vector_norm_sharded(x: Any, ord: Any = 2, dim: Any = None, keepdim: bool = False, *, dtype: Any = None) -> Any:
    """Along a sharded dimension: reduce the sum of powers, or the extreme, before the root."""
    dims = _reduced_dims(x, dim)
    narrow = x.dtype in (torch.float16, torch.bfloat16) and dtype in (None, x.dtype)  # powers would overflow
    if not is_sharded(x, dims) or (ord in SUMS and not narrow) or -INF < ord < 0 or 0 in x.shape:
        return NotImplemented
    if narrow:
        return torch.linalg.vector_norm(x.float(), ord, dim, keepdim).to(x.dtype)
    size = (x if dtype is None else x.to(dtype)).abs()
    if ord in (INF, -INF):
        return size.amax(dim=dims, keepdim=keepdim) if ord > 0 else size.amin(dim=dims, keepdim=keepdim)
    return _root(_power(size, ord).sum(dim=dims, keepdim=keepdim), ord)


def _reduced_dims(x: Any, dim: Any) -> list[int]:
    every = range(x.ndim) if dim is None or dim in ([], ()) else dim if isinstance(dim, Sequence) else [dim]
    return [d % max(x.ndim, 1) for d in every] if x.ndim else []


def _power(size: Any, ord: float) -> Any:
    if ord == 2:
        return size * size
    if ord >= 1:
        return size.pow(ord)
    return _zero_at_zero(size, lambda positive: positive.pow(ord))


def _root(total: Any, ord: float) -> Any:
    return _zero_at_zero(total, torch.sqrt if ord == 2 else lambda positive: positive.pow(1.0 / ord))


def _zero_at_zero(value: Any, function: Any) -> Any:
    """Apply a function that is zero at zero, with zero gradient there (as torch), where its own is infinite."""
    if not (value.requires_grad and torch.is_grad_enabled()):
        return function(value)
    zero = value == 0
    return torch.where(zero, torch.zeros_like(value), function(torch.where(zero, torch.ones_like(value), value)))


def _matrix_dims(ndim: int, dim: Any) -> tuple[int, int]:
    rows, columns = dim
    return rows % max(ndim, 1), columns % max(ndim, 1)


@rule("linalg_matrix_norm")
def _matrix_norm(
    A: Operand,  # noqa: N803  # torch's name
    ord: Any = "fro",
    dim: Any = (-2, -1),
    keepdim: bool = False,
    *,
    dtype: Any = None,
) -> Strategies | None:
    del ord, dtype
    if A.ndim < 2:
        return None
    dims = _matrix_dims(A.ndim, dim)
    ins: list[Label] = [None if d in dims else d for d in range(A.ndim)]
    return Strategies(index_strategies([A], [ins], [reduction_labels(A, dims, keepdim)[1]]))


@composite("linalg_matrix_norm")
def _matrix_norm_sharded(
    A: Any,  # noqa: N803  # torch's name
    ord: Any = "fro",
    dim: Any = (-2, -1),
    keepdim: bool = False,
    *,
    dtype: Any = None,
) -> Any:
    """The Frobenius norm is a vector norm; row and column norms are extremes of sums; others replicate the matrix."""
    if A.ndim < 2 or len(dim) != 2:
        return NotImplemented
    rows, columns = _matrix_dims(A.ndim, dim)
    if rows == columns or not is_sharded(A, [rows, columns]) or 0 in A.shape:
        return NotImplemented
    if ord == "fro":
        return torch.linalg.vector_norm(A, 2, (rows, columns), keepdim, dtype=dtype)
    if ord not in (1, -1, INF, -INF):
        return NotImplemented
    summed, compared = (rows, columns) if abs(ord) == 1 else (columns, rows)
    sums = torch.linalg.vector_norm(A, 1, summed, True, dtype=dtype)
    extreme = sums.amax(dim=compared, keepdim=True) if ord > 0 else sums.amin(dim=compared, keepdim=True)
    return extreme if keepdim else extreme.squeeze((rows, columns))


@composite("linalg_norm")
def _linalg_norm(
    A: Any,  # noqa: N803  # torch's name
    ord: Any = None,
    dim: Any = None,
    keepdim: bool = False,
    *,
    dtype: Any = None,
) -> Any:
    """Return a vector or a matrix norm, by torch's rules."""
    dims = [dim] if isinstance(dim, int) else dim
    if ord is None or (len(dims) == 1 if dims is not None else A.ndim == 1):
        if isinstance(ord, str):
            return NotImplemented  # torch raises the error
        return torch.linalg.vector_norm(A, 2 if ord is None else ord, dims, keepdim, dtype=dtype)
    if (len(dims) if dims is not None else A.ndim) != 2:
        return NotImplemented
    return torch.linalg.matrix_norm(A, ord, (-2, -1) if dims is None else tuple(dims), keepdim, dtype=dtype)


@composite("norm")
def _norm(input: Any, p: Any = "fro", dim: Any = None, keepdim: bool = False, dtype: Any = None) -> Any:
    if p == "nuc":
        dims = range(input.ndim) if dim is None else dim
        return torch.linalg.matrix_norm(input, "nuc", tuple(dims), keepdim, dtype=dtype)
    if isinstance(p, str) and p != "fro":
        return NotImplemented
    return torch.linalg.vector_norm(input, 2 if p in ("fro", None) else p, dim, keepdim, dtype=dtype)


@composite("frobenius_norm")
def _frobenius_norm(input: Any, dim: Any = None, keepdim: bool = False) -> Any:
    return torch.linalg.vector_norm(input, 2, dim, keepdim)


@composite("nuclear_norm")
def _nuclear_norm(input: Any, dim: Any = (-2, -1), keepdim: bool = False) -> Any:
    return torch.linalg.matrix_norm(input, "nuc", tuple(dim), keepdim)
