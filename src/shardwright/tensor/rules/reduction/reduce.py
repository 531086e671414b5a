"""Reductions: a cut dimension that is reduced gives a partial result, with no communication."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import prod
from typing import Any

import torch
from torch import Tensor

from shardwright.errors import TensorError
from shardwright.layout import Layout
from shardwright.tensor.base.gradient_types import ENTERED
from shardwright.tensor.base.registry import composite, rule
from shardwright.tensor.base.strategy import Labels, Local, LocalContext, Operand, Strategies, index_strategies
from shardwright.tensor.base.tagging import alias, no_torch_function, tag
from shardwright.tensor.dispatch.cache import mark_fast
from shardwright.tensor.redistribute.autograd import redistribute_local
from shardwright.tensor.redistribute.identity import identity_element
from shardwright.tensor.redistribute.implicit import completed
from shardwright.tensor.rules.elementwise.pointwise import pointwise

__all__ = ["along", "extreme_cut", "is_cut", "reduced_dims", "reduction_labels"]

Dims = int | Sequence[int] | None


def reduced_dims(input: Operand, dim: Dims) -> tuple[int, ...]:
    """The dimensions a reduction runs over, all of them where none is named."""
    if dim is None or (isinstance(dim, list | tuple) and not dim):
        return tuple(range(input.ndim))
    dims = dim if isinstance(dim, list | tuple) else (dim,)
    return tuple(input.dim(d) for d in dims) if input.ndim else ()


def reduction_labels(input: Operand, dims: Sequence[int], keepdim: bool) -> tuple[Labels, Labels]:
    """Labels of what is reduced along these dimensions, and of the result."""
    ins: list[int] = list(range(input.ndim))
    out: list[Any] = [None if d in dims else d for d in ins] if keepdim else [d for d in ins if d not in dims]
    return ins, out


@rule("nansum")
def _nansum(input: Operand, dim: Any = None, keepdim: bool = False, *, dtype: Any = None) -> Strategies:
    """Not linear: an addend is left out only where it is itself not a number."""
    del dtype
    ins, out = reduction_labels(input, reduced_dims(input, dim), keepdim)
    return Strategies(index_strategies([input], [ins], [out]))


@rule("sum")
def _sum(input: Operand, dim: Any = None, keepdim: bool = False, *, dtype: Any = None) -> Strategies:
    del dtype
    ins, out = reduction_labels(input, reduced_dims(input, dim), keepdim)
    return Strategies(index_strategies([input], [ins], [out], terms=[[0]]))


@rule("mean")
def _mean(input: Operand, dim: Any = None, keepdim: bool = False, *, dtype: Any = None) -> Strategies:
    """A local sum over the global count: exact for uneven and for empty shards."""
    dims = reduced_dims(input, dim)
    ins, out = reduction_labels(input, dims, keepdim)
    count = prod(input.shape[d] for d in dims)

    def run(context: LocalContext) -> Local | None:
        if not any(context.ins[0].cut_by(d) for d in dims):
            return None

        def local(_: Any, args: Any, kwargs: Any) -> Any:
            source = args[0] if args else kwargs["input"]
            if not (dtype or source.dtype).is_floating_point and not (dtype or source.dtype).is_complex:
                raise TensorError(f"mean of {source.dtype}: only floating and complex numbers have one; give a dtype")
            total = source.sum(dim=dims, keepdim=keepdim, dtype=dtype) if dims else source
            return total / count

        return local

    return Strategies(index_strategies([input], [ins], [out], terms=[[0]]), run=run)


def _extreme(op: str) -> Callable[..., Strategies]:
    def answer(input: Operand, dim: Any = (), keepdim: bool = False) -> Strategies:
        dims = reduced_dims(input, dim)
        ins, out = reduction_labels(input, dims, keepdim)
        # A partial maximum has no gradient: where one is asked for, the reduced dimensions are not cut.
        reduction = None if input.grad or 0 in input.shape or input.dtype.is_complex else op

        def run(context: LocalContext) -> Local | None:
            """The maximum of nothing is an error: a rank that has nothing along these dimensions says the least."""
            mine = context.ins[0].local_shape(context.rank)
            if all(
                mine[d] or not input.shape[d] for d in dims
            ):  # of what is empty altogether, torch says what is wrong
                return None
            result = context.outs[0].local_shape(context.rank)
            return lambda _, args, __: args[0].new_full(result, identity_element(args[0].dtype, op))

        return Strategies(index_strategies([input], [ins], [out], reduction=reduction), run=run)

    return answer


rule("amax")(_extreme("max"))
rule("amin")(_extreme("min"))


def is_cut(input: Any, dims: Sequence[int]) -> bool:
    """Whether any of these dimensions of a DTensor is spread over several ranks."""
    layout = input._layout
    return any(layout.mesh.shape[mesh_dim] > 1 for dim in dims for mesh_dim in layout.cut_by(dim))


class _Chosen(torch.autograd.Function):
    """An extreme that is known: its gradient goes to the elements that are as great, in equal shares."""

    @staticmethod
    def forward(ctx: Any, local: Tensor, extreme: Tensor, shares: Tensor, layout: Layout, reduced: Any) -> Tensor:
        del local
        ctx.save_for_backward(shares)
        placements = [ENTERED if mesh_dim in reduced else p for mesh_dim, p in enumerate(layout.placements)]
        ctx.known = layout, layout.replace(placements=placements, order=layout.order)
        return extreme.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None, None, None]:
        (shares,) = ctx.saved_tensors
        return redistribute_local(gradient, *ctx.known) * shares, None, None, None, None


def extreme_cut(op: str, *, nan_is_chosen: bool = False) -> Callable[..., Any]:
    """`amax` or `amin` along cut dimensions, with a gradient: extremes and their counts are exchanged, never elements.

    Where there is a NaN, it is the extreme; torch's `max()` gives the gradient to it, `amax` makes one of NaNs.
    """

    def compose(input: Any, dim: Any = (), keepdim: bool = False) -> Any:
        layout = input._layout
        if not (input.requires_grad and torch.is_grad_enabled()) or layout.is_partial or 0 in layout.shape:
            return NotImplemented
        named = range(layout.ndim) if dim in ((), []) else [dim] if isinstance(dim, int) else dim
        dims = [d % max(layout.ndim, 1) for d in named]
        if not is_cut(input, dims):
            return NotImplemented
        values = input.detach()
        extreme = completed(op, getattr(values, op)(dim=dims, keepdim=True))
        chosen = (values == extreme) | values.isnan() if nan_is_chosen else values == extreme
        equal = chosen.to(values.dtype)
        shares = equal / completed(op, equal.sum(dim=dims, keepdim=True))
        reduced = {mesh_dim for d in dims for mesh_dim in layout.cut_by(d)}
        with no_torch_function():
            value = _Chosen.apply(input, extreme, alias(shares), extreme._layout, reduced)  # type: ignore[no-untyped-call]  # torch's apply is untyped
        result = tag(value, extreme._layout)
        return result if keepdim else result.squeeze(dims)

    return compose


composite("amax")(extreme_cut("amax"))
composite("amin")(extreme_cut("amin"))


@rule("prod")
def _prod(input: Operand, dim: int | None = None, keepdim: bool = False, *, dtype: Any = None) -> Strategies:
    del dtype
    ins, out = reduction_labels(input, reduced_dims(input, dim), keepdim)
    return Strategies(index_strategies([input], [ins], [out], reduction=None if input.grad else "product"))


@rule("any")
def _any(input: Operand, dim: Any = None, keepdim: bool = False) -> Strategies:
    if dim in ((), []):  # over no dimension: element by element
        return pointwise()(input)
    ins, out = reduction_labels(input, reduced_dims(input, dim), keepdim)
    return Strategies(index_strategies([input], [ins], [out], reduction="bor"))


@rule("all")
def _all(input: Operand, dim: Any = None, keepdim: bool = False) -> Strategies:
    if dim in ((), []):
        return pointwise()(input)
    ins, out = reduction_labels(input, reduced_dims(input, dim), keepdim)
    return Strategies(index_strategies([input], [ins], [out], reduction="band"))


@rule("count_nonzero")
def _count_nonzero(input: Operand, dim: Any = None) -> Strategies:
    ins, out = reduction_labels(input, reduced_dims(input, dim), False)
    return Strategies(index_strategies([input], [ins], [out]))


def along(results: int, keeps: bool) -> Callable[..., Strategies | None]:
    """A rule for what works along one whole dimension, all others being independent of each other.

    `keeps`: the dimension stays as it is (a cumulation); else it is reduced, or kept as 1 with `keepdim`.
    """

    def answer(input: Operand, dim: Any = None, keepdim: bool = False, **_: Any) -> Strategies | None:
        if dim is None:
            return None
        dims = reduced_dims(input, dim)
        ins, out = reduction_labels(input, dims, keepdim)
        return Strategies(
            index_strategies([input], [ins], [ins if keeps else out] * results, whole=set(dims), reduction=None)
        )

    return answer


rule("argmax", "argmin")(along(1, keeps=False))
rule("median", "nanmedian", "mode")(along(2, keeps=False))
rule("cummax", "cummin")(along(2, keeps=True))
rule("logcumsumexp", "cumprod")(along(1, keeps=True))


@rule("cumsum")
def _cumsum(input: Operand, dim: int, *, dtype: Any = None) -> Strategies:
    del dtype
    labels = list(range(input.ndim))
    whole: set[Any] = set(reduced_dims(input, dim))
    return Strategies(index_strategies([input], [labels], [labels], terms=[[0]], whole=whole, reduction=None))


def _max_or_min(op: str) -> Callable[..., Strategies | None]:
    def answer(input: Operand, other: Any = None, keepdim: bool = False, *, dim: Any = None) -> Strategies | None:
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


@composite("logsumexp", "special_logsumexp")
def _logsumexp(input: Any, dim: Any, keepdim: bool = False) -> Any:
    dims = dim if isinstance(dim, list | tuple) else [dim]
    if not input.dtype.is_floating_point or 0 in input.shape:
        return NotImplemented
    peak = input.detach().amax(dim=dims, keepdim=True)
    peak = torch.where(peak.isfinite(), peak, torch.zeros_like(peak))
    total = (input - peak).exp().sum(dim=dims, keepdim=keepdim).log()
    return total + (peak if keepdim else peak.sum(dim=dims))


mark_fast("sum", "mean")
