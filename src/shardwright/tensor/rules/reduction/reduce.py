"""Reductions: reducing a sharded dimension gives a partial result without communication."""

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

__all__ = ["along", "is_sharded", "reduced_dims", "reduction_labels", "sharded_extreme"]

Dims = int | Sequence[int] | None


def reduced_dims(input: Operand, dim: Dims) -> tuple[int, ...]:
    """Return the dimensions of a reduction; all of them if none is given."""
    if dim is None or (isinstance(dim, list | tuple) and not dim):
        return tuple(range(input.ndim))
    dims = dim if isinstance(dim, list | tuple) else (dim,)
    return tuple(input.dim(d) for d in dims) if input.ndim else ()


def reduction_labels(input: Operand, dims: Sequence[int], keepdim: bool) -> tuple[Labels, Labels]:
    """Return labels of a tensor reduced along these dimensions, and of the result."""
    ins: list[int] = list(range(input.ndim))
    out: list[Any] = [None if d in dims else d for d in ins] if keepdim else [d for d in ins if d not in dims]
    return ins, out


@rule("nansum")
def _nansum(input: Operand, dim: Any = None, keepdim: bool = False, *, dtype: Any = None) -> Strategies:
    """Not linear: NaN is only detectable in the complete value, not in partial values."""
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
    """A local sum divided by the global count: exact for uneven and empty shards."""
    dims = reduced_dims(input, dim)
    ins, out = reduction_labels(input, dims, keepdim)
    count = prod(input.shape[d] for d in dims)

    def run(context: LocalContext) -> Local | None:
        if not any(context.ins[0].cut_by(d) for d in dims):
            return None

        def local(_: Any, args: Any, kwargs: Any) -> Any:
            source = args[0] if args else kwargs["input"]
            if not (dtype or source.dtype).is_floating_point and not (dtype or source.dtype).is_complex:
                raise TensorError(
                    f"mean: expected a floating-point or complex dtype, got {dtype or source.dtype}; pass dtype=..."
                )
            total = source.sum(dim=dims, keepdim=keepdim, dtype=dtype) if dims else source
            return total / count

        return local

    return Strategies(index_strategies([input], [ins], [out], terms=[[0]]), run=run)


def _extreme(op: str) -> Callable[..., Strategies]:
    def find_strategies(input: Operand, dim: Any = (), keepdim: bool = False) -> Strategies:
        dims = reduced_dims(input, dim)
        ins, out = reduction_labels(input, dims, keepdim)
        # A partial maximum has no gradient: if one is required, the reduced dimensions are not sharded.
        reduction = None if input.grad or 0 in input.shape or input.dtype.is_complex else op

        def run(context: LocalContext) -> Local | None:
            """torch rejects empty maxima: a rank with an empty shard contributes the identity of the reduction."""
            local_shape = context.ins[0].local_shape(context.rank)
            # torch raises the error if the global tensor is empty
            if all(local_shape[d] or not input.shape[d] for d in dims):
                return None
            result = context.outs[0].local_shape(context.rank)
            return lambda _, args, __: args[0].new_full(result, identity_element(args[0].dtype, op))

        return Strategies(index_strategies([input], [ins], [out], reduction=reduction), run=run)

    return find_strategies


rule("amax")(_extreme("max"))
rule("amin")(_extreme("min"))


def is_sharded(input: Any, dims: Sequence[int]) -> bool:
    """True if any of these dimensions of a DTensor is sharded over several ranks."""
    layout = input._layout
    return any(layout.mesh.shape[mesh_dim] > 1 for dim in dims for mesh_dim in layout.cut_by(dim))


class _KnownExtreme(torch.autograd.Function):
    """A known extreme: its gradient is distributed evenly over the elements equal to it."""

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


def sharded_extreme(op: str, *, select_nan: bool = False) -> Callable[..., Any]:
    """Return `amax` or `amin` along sharded dimensions with a gradient: only extremes and their counts are exchanged.

    NaN is the extreme if there is one; torch's `max()` sends the gradient to it, `amax` gives NaN gradients.
    """

    def compose(input: Any, dim: Any = (), keepdim: bool = False) -> Any:
        layout = input._layout
        if not (input.requires_grad and torch.is_grad_enabled()) or layout.is_partial or 0 in layout.shape:
            return NotImplemented
        named = range(layout.ndim) if dim in ((), []) else [dim] if isinstance(dim, int) else dim
        dims = [d % max(layout.ndim, 1) for d in named]
        if not is_sharded(input, dims):
            return NotImplemented
        values = input.detach()
        extreme = completed(op, getattr(values, op)(dim=dims, keepdim=True))
        selected = (values == extreme) | values.isnan() if select_nan else values == extreme
        equal = selected.to(values.dtype)
        shares = equal / completed(op, equal.sum(dim=dims, keepdim=True))
        reduced = {mesh_dim for d in dims for mesh_dim in layout.cut_by(d)}
        with no_torch_function():
            value = _KnownExtreme.apply(input, extreme, alias(shares), extreme._layout, reduced)  # type: ignore[no-untyped-call]  # untyped in torch
        result = tag(value, extreme._layout)
        return result if keepdim else result.squeeze(dims)

    return compose


composite("amax")(sharded_extreme("amax"))
composite("amin")(sharded_extreme("amin"))


@rule("prod")
def _prod(input: Operand, dim: int | None = None, keepdim: bool = False, *, dtype: Any = None) -> Strategies:
    del dtype
    ins, out = reduction_labels(input, reduced_dims(input, dim), keepdim)
    return Strategies(index_strategies([input], [ins], [out], reduction=None if input.grad else "product"))


@rule("any")
def _any(input: Operand, dim: Any = None, keepdim: bool = False) -> Strategies:
    if dim in ((), []):  # over no dimension: pointwise
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
    """Return a rule for an operator along one replicated dimension; all others are independent.

    `keeps`: the dimension keeps its size (a scan); otherwise it is reduced, or kept as 1 with `keepdim`.
    """

    def find_strategies(input: Operand, dim: Any = None, keepdim: bool = False, **_: Any) -> Strategies | None:
        if dim is None:
            return None
        dims = reduced_dims(input, dim)
        ins, out = reduction_labels(input, dims, keepdim)
        return Strategies(
            index_strategies([input], [ins], [ins if keeps else out] * results, whole=set(dims), reduction=None)
        )

    return find_strategies


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
    def find_strategies(
        input: Operand, other: Any = None, keepdim: bool = False, *, dim: Any = None
    ) -> Strategies | None:
        if isinstance(other, Operand):
            return pointwise()(input, other)
        over = other if dim is None else dim
        return _extreme(op)(input) if over is None else along(2, keeps=False)(input, over, keepdim)

    return find_strategies


rule("max")(_max_or_min("max"))
rule("min")(_max_or_min("min"))


def _moments(input: Any, dim: Any, correction: Any, keepdim: bool) -> tuple[Any, Any]:
    """Mean and variance by two sums: exact for every sharding."""
    named = [dim] if isinstance(dim, int) else dim or range(input.ndim)  # none, or an empty list: all of them
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
        ddof = correction if correction is not None else int(unbiased is not False)
        variance, mean = _moments(input, dim, ddof, keepdim)
        result = variance.sqrt() if root else variance
        return (result, mean) if with_mean else result

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
