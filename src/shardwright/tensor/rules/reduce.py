"""Reductions: a cut dimension that is reduced gives a partial result, with no communication."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import prod
from typing import Any

import torch

from shardwright.errors import TensorError
from shardwright.tensor.registry import composite, mark_fast, rule
from shardwright.tensor.rules.notation import Labels, Local, Operand, Situation, Ways, index_ways
from shardwright.tensor.rules.pointwise import pointwise

__all__ = ["along", "reduced_dims"]

Dims = int | Sequence[int] | None


def reduced_dims(input: Operand, dim: Dims) -> tuple[int, ...]:
    """The dimensions a reduction runs over, all of them where none is named."""
    if dim is None or (isinstance(dim, list | tuple) and not dim):
        return tuple(range(input.ndim))
    dims = dim if isinstance(dim, list | tuple) else (dim,)
    return tuple(input.dim(d) for d in dims) if input.ndim else ()


def _labels(input: Operand, dims: tuple[int, ...], keepdim: bool) -> tuple[Labels, Labels]:
    ins: list[int] = list(range(input.ndim))
    out: list[Any] = [None if d in dims else d for d in ins] if keepdim else [d for d in ins if d not in dims]
    return ins, out


@rule("nansum")
def _nansum(input: Operand, dim: Any = None, keepdim: bool = False, *, dtype: Any = None) -> Ways:
    """Not linear: an addend is left out only where it is itself not a number."""
    del dtype
    ins, out = _labels(input, reduced_dims(input, dim), keepdim)
    return Ways(index_ways([input], [ins], [out]))


@rule("sum")
def _sum(input: Operand, dim: Any = None, keepdim: bool = False, *, dtype: Any = None) -> Ways:
    del dtype
    ins, out = _labels(input, reduced_dims(input, dim), keepdim)
    return Ways(index_ways([input], [ins], [out], terms=[[0]]))


@rule("mean")
def _mean(input: Operand, dim: Any = None, keepdim: bool = False, *, dtype: Any = None) -> Ways:
    """A local sum over the global count: exact for uneven and for empty shards."""
    dims = reduced_dims(input, dim)
    ins, out = _labels(input, dims, keepdim)
    count = prod(input.shape[d] for d in dims)

    def run(situation: Situation) -> Local | None:
        if not any(situation.ins[0].cut_by(d) for d in dims):
            return None

        def local(_: Any, args: Any, kwargs: Any) -> Any:
            source = args[0] if args else kwargs["input"]
            if not (dtype or source.dtype).is_floating_point and not (dtype or source.dtype).is_complex:
                raise TensorError(f"mean of {source.dtype}: only floating and complex numbers have one; give a dtype")
            total = source.sum(dim=dims, keepdim=keepdim, dtype=dtype) if dims else source
            return total / count

        return local

    return Ways(index_ways([input], [ins], [out], terms=[[0]]), run=run)


def _extreme(op: str) -> Callable[..., Ways]:
    def answer(input: Operand, dim: Any = (), keepdim: bool = False) -> Ways:
        ins, out = _labels(input, reduced_dims(input, dim), keepdim)
        # A partial maximum has no gradient: where one is asked for, the reduced dimensions are not cut.
        reduction = None if input.grad or 0 in input.shape or input.dtype.is_complex else op
        at = index_ways([input], [ins], [out], reduction=reduction)
        return Ways(_without_empty_shards(at, input, reduced_dims(input, dim)))

    return answer


def _without_empty_shards(at: Any, input: Operand, dims: tuple[int, ...]) -> Any:
    """Only ways in which every rank has something to reduce: the maximum of nothing is an error."""

    def filtered(mesh_dim: int) -> Any:
        ranks = input.layout.mesh.size
        kept = []
        for way in at(mesh_dim):
            placement = way.ins[0]
            cut = placement.is_shard() and placement.dim in dims
            if not cut or (_least(input.shape[placement.dim], ranks) > 0 and not hasattr(placement, "sizes")):
                kept.append(way)
        return kept

    return filtered


def _least(size: int, ranks: int) -> int:
    """The smallest shard, were the dimension cut over all ranks of the mesh."""
    chunk = -(-size // ranks)
    return max(0, min(chunk, size - chunk * (ranks - 1)))


rule("amax")(_extreme("max"))
rule("amin")(_extreme("min"))


@rule("prod")
def _prod(input: Operand, dim: int | None = None, keepdim: bool = False, *, dtype: Any = None) -> Ways:
    del dtype
    ins, out = _labels(input, reduced_dims(input, dim), keepdim)
    return Ways(index_ways([input], [ins], [out], reduction=None if input.grad else "product"))


@rule("any")
def _any(input: Operand, dim: Any = None, keepdim: bool = False) -> Ways:
    if dim in ((), []):  # over no dimension: element by element
        return pointwise()(input)
    ins, out = _labels(input, reduced_dims(input, dim), keepdim)
    return Ways(index_ways([input], [ins], [out], reduction="bor"))


@rule("all")
def _all(input: Operand, dim: Any = None, keepdim: bool = False) -> Ways:
    if dim in ((), []):
        return pointwise()(input)
    ins, out = _labels(input, reduced_dims(input, dim), keepdim)
    return Ways(index_ways([input], [ins], [out], reduction="band"))


@rule("count_nonzero")
def _count_nonzero(input: Operand, dim: Any = None) -> Ways:
    ins, out = _labels(input, reduced_dims(input, dim), False)
    return Ways(index_ways([input], [ins], [out]))


def along(results: int, keeps: bool) -> Callable[..., Ways | None]:
    """A rule for what works along one whole dimension, all others being independent of each other.

    `keeps`: the dimension stays as it is (a cumulation); else it is reduced, or kept as 1 with `keepdim`.
    """

    def answer(input: Operand, dim: Any = None, keepdim: bool = False, **_: Any) -> Ways | None:
        if dim is None:
            return None
        dims = reduced_dims(input, dim)
        ins, out = _labels(input, dims, keepdim)
        return Ways(index_ways([input], [ins], [ins if keeps else out] * results, whole=set(dims), reduction=None))

    return answer


rule("argmax", "argmin")(along(1, keeps=False))
rule("median", "nanmedian", "mode")(along(2, keeps=False))
rule("cummax", "cummin")(along(2, keeps=True))
rule("logcumsumexp", "cumprod")(along(1, keeps=True))


@rule("cumsum")
def _cumsum(input: Operand, dim: int, *, dtype: Any = None) -> Ways:
    del dtype
    labels = list(range(input.ndim))
    whole: set[Any] = set(reduced_dims(input, dim))
    return Ways(index_ways([input], [labels], [labels], terms=[[0]], whole=whole, reduction=None))


def _max_or_min(op: str) -> Callable[..., Ways | None]:
    def answer(input: Operand, other: Any = None, keepdim: bool = False, *, dim: Any = None) -> Ways | None:
        if isinstance(other, Operand):
            return pointwise()(input, other)
        over = other if dim is None else dim
        return _extreme(op)(input) if over is None else along(2, keeps=False)(input, over, keepdim)

    return answer


rule("max")(_max_or_min("max"))
rule("min")(_max_or_min("min"))


def _moments(input: Any, dim: Any, correction: Any, keepdim: bool) -> tuple[Any, Any]:
    """Mean and variance by two sums: exact for any cut."""
    named = [dim] if isinstance(dim, int) else dim or range(input.ndim)  # none named, or an empty list: all of them
    dims = [d % max(input.ndim, 1) for d in named]
    count = prod(input.shape[d] for d in dims)
    mean = input.mean(dim=dims, keepdim=True)
    centred = input - mean
    square = centred * centred.conj() if input.is_complex() else centred * centred
    variance = square.sum(dim=dims, keepdim=keepdim) / max(0.0, count - correction) if count > correction else None
    if variance is None:
        variance = square.sum(dim=dims, keepdim=keepdim) * float("nan")
    variance = variance.real if input.is_complex() else variance
    return variance, mean if keepdim else mean.sum(dim=dims)


def _variance(root: bool, with_mean: bool) -> Callable[..., Any]:
    def compose(
        input: Any, dim: Any = None, unbiased: bool | None = None, keepdim: bool = False, *, correction: Any = None
    ) -> Any:
        if isinstance(dim, bool):  # x.var(False)
            dim, unbiased = None, dim
        if not input.dtype.is_floating_point and not input.dtype.is_complex:
            return NotImplemented
        freedom = correction if correction is not None else int(unbiased is not False)
        variance, mean = _moments(input, dim, freedom, keepdim)
        spread = variance.sqrt() if root else variance
        return (spread, mean) if with_mean else spread

    return compose


composite("var")(_variance(root=False, with_mean=False))
composite("std")(_variance(root=True, with_mean=False))
composite("var_mean")(_variance(root=False, with_mean=True))
composite("std_mean")(_variance(root=True, with_mean=True))


@composite("logsumexp")
def _logsumexp(input: Any, dim: Any, keepdim: bool = False) -> Any:
    dims = dim if isinstance(dim, list | tuple) else [dim]
    if not input.dtype.is_floating_point or 0 in input.shape:
        return NotImplemented
    peak = input.detach().amax(dim=dims, keepdim=True)
    peak = torch.where(peak.isfinite(), peak, torch.zeros_like(peak))
    total = (input - peak).exp().sum(dim=dims, keepdim=keepdim).log()
    return total + (peak if keepdim else peak.sum(dim=dims))


@composite("linalg_vector_norm")
def _vector_norm(x: Any, ord: Any = 2, dim: Any = None, keepdim: bool = False, *, dtype: Any = None) -> Any:
    """Norms of any order: a sum of powers, or an extreme, each of which a cut dimension gives in part."""
    if x.dtype in (torch.float16, torch.bfloat16) and dtype in (None, x.dtype):  # powers would overflow
        return _vector_norm(x.float(), ord, dim, keepdim).to(x.dtype)
    x = x if dtype is None else x.to(dtype)
    dims = list(range(x.ndim)) if dim is None else dim if isinstance(dim, list | tuple) else [dim]
    size = x.abs()
    if ord == 2:
        return _euclid(size if x.is_complex() else x, dims, keepdim)
    if ord == 1:
        return size.sum(dim=dims, keepdim=keepdim)
    if ord == 0:
        return (x != 0).to(size.dtype).sum(dim=dims, keepdim=keepdim)
    if ord in (float("inf"), float("-inf")):
        return size.amax(dim=dims, keepdim=keepdim) if ord > 0 else size.amin(dim=dims, keepdim=keepdim)
    return size.pow(ord).sum(dim=dims, keepdim=keepdim).pow(1.0 / ord)


def _euclid(x: Any, dims: Any, keepdim: bool) -> Any:
    squares = (x * x).sum(dim=dims, keepdim=keepdim)
    root = squares.sqrt()
    if not root.requires_grad:
        return root
    # The gradient of a norm at zero is zero, as torch has it, where that of a root is not a number.
    zero = squares == 0
    return torch.where(zero, torch.zeros_like(root), torch.where(zero, torch.ones_like(root), squares).sqrt())


@composite("norm")
def _norm(input: Any, p: Any = "fro", dim: Any = None, keepdim: bool = False, dtype: Any = None) -> Any:
    order = 2 if p in ("fro", None) else p
    if isinstance(order, str):
        return NotImplemented
    return torch.linalg.vector_norm(input, order, dim, keepdim, dtype=dtype)


mark_fast("sum", "mean")
