"""Pointwise operators, with broadcasting and type promotion: inputs sharded the same way stay sharded."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from shardwright.tensor.base.gradient_types import REPLICATE
from shardwright.tensor.base.registry import composite, rule
from shardwright.tensor.base.rounding import keeps_every_value
from shardwright.tensor.base.strategy import (
    Labels,
    Local,
    LocalContext,
    MeshStrategy,
    Operand,
    Strategies,
    index_strategies,
)
from shardwright.tensor.dispatch.cache import mark_fast, mark_uniform
from shardwright.tensor.rules.elementwise.overwrite import as_partial_value, overwrite_strategies

__all__ = ["broadcast_labels", "operands_in", "pointwise"]

NONLINEAR = """
abs acos acosh asin asinh atan atan2 atanh bitwise_and bitwise_left_shift bitwise_not bitwise_or bitwise_right_shift
bitwise_xor ceil celu clamp clamp_max clamp_min copysign cos cosh deg2rad digamma elu eq erf erfc erfinv exp exp2 expm1
float_power floor floor_divide fmax fmin fmod frac gcd ge gelu gt hardshrink hardsigmoid hardswish hardtanh heaviside
hypot i0 igamma igammac isclose isfinite isinf isnan isneginf isposinf isreal lcm le leaky_relu lgamma log
log10 log1p log2 logaddexp logaddexp2 logical_and logical_not logical_or logical_xor logit log_sigmoid lt
maximum minimum mish mvlgamma nan_to_num ne nextafter polygamma pow rad2deg rdiv reciprocal relu relu6
remainder round rsqrt selu sgn sigmoid sign signbit silu sin sinc sinh softplus softshrink softsign sqrt square tan
tanh tanhshrink threshold trunc xlogy special_xlog1py special_entr special_erfcx special_i0e special_i1 special_i1e
special_ndtr special_ndtri special_log_ndtr special_zeta special_xlogy angle polar masked_fill special_airy_ai
special_bessel_j0 special_bessel_j1 special_bessel_y0 special_bessel_y1 special_chebyshev_polynomial_t
special_chebyshev_polynomial_u special_chebyshev_polynomial_v special_chebyshev_polynomial_w special_gammainc
special_gammaincc special_gammaln special_hermite_polynomial_h special_hermite_polynomial_he special_i0
special_laguerre_polynomial_l special_legendre_polynomial_p special_modified_bessel_i0 special_modified_bessel_i1
special_modified_bessel_k0 special_modified_bessel_k1 special_multigammaln special_polygamma special_psi
special_scaled_modified_bessel_k0 special_scaled_modified_bessel_k1 special_shifted_chebyshev_polynomial_t
special_shifted_chebyshev_polynomial_u special_shifted_chebyshev_polynomial_v special_shifted_chebyshev_polynomial_w
special_spherical_bessel_j0
""".split()
LINEAR_UNARY = """
neg positive real imag conj conj_physical resolve_conj resolve_neg clone contiguous detach alias view_as_real
""".split()
COPIES = "cpu cuda type to".split()
CASTS = {
    "half": torch.float16,
    "bfloat16": torch.bfloat16,
    "float": torch.float32,
    "double": torch.float64,
    "cfloat": torch.complex64,
    "cdouble": torch.complex128,
    "int": torch.int32,
    "long": torch.int64,
    "short": torch.int16,
    "char": torch.int8,
    "byte": torch.uint8,
    "bool": torch.bool,
}


def operands_in(*values: Any) -> list[Operand]:
    """Return the tensors among the arguments, in order."""
    operands: list[Operand] = []
    for value in values:
        if isinstance(value, Operand):
            operands.append(value)
        elif isinstance(value, list | tuple):
            operands += operands_in(*value)
    return operands


def broadcast_labels(operands: Sequence[Operand]) -> tuple[list[Labels], Labels]:
    """Return labels of broadcast operands and of their result; a dimension is labelled by its index in the result."""
    ndim = max(operand.ndim for operand in operands)
    shape = torch.broadcast_shapes(*(operand.shape for operand in operands))  # type: ignore[no-untyped-call]  # untyped in torch
    ins: list[Labels] = []
    for operand in operands:
        first = ndim - operand.ndim
        ins.append([first + d if size == shape[first + d] else None for d, size in enumerate(operand.shape)])
    return ins, list(range(ndim))


Terms = Callable[..., Sequence[Sequence[int]] | None]


def pointwise(terms: Terms | None = None) -> Callable[..., Strategies]:
    """Return a rule for a pointwise operator; `terms(*args)` gives the terms it is linear in."""

    def find_strategies(*args: Any, **kwargs: Any) -> Strategies:
        operands = operands_in(*args, *kwargs.values())
        ins, out = broadcast_labels(operands)
        linear = None if terms is None else terms(*args, **kwargs)
        return Strategies(index_strategies(operands, ins, [out], terms=linear))

    return find_strategies


# Parameter names are torch's: they may be passed by keyword.
def _sum_terms(input: Any, other: Any, **_: Any) -> Sequence[Sequence[int]] | None:
    return [[0], [1]] if isinstance(input, Operand) and isinstance(other, Operand) else None


def _product_terms(*factors: Any, other: Any = None, **_: Any) -> Sequence[Sequence[int]]:
    return [list(range(len(operands_in(*factors, other))))]


def _quotient_terms(
    input: Any, other: Any, rounding_mode: str | None = None, **_: Any
) -> Sequence[Sequence[int]] | None:
    del other
    return [[0]] if isinstance(input, Operand) and rounding_mode is None else None


def _where_terms(condition: Any, input: Any, other: Any) -> Sequence[Sequence[int]] | None:
    if not (isinstance(condition, Operand) and isinstance(input, Operand) and isinstance(other, Operand)):
        return None
    if input.dtype == torch.bool:  # `x.where(condition, other)`; bool tensors have no sum
        return None if condition.dtype == torch.bool else [[0], [2]]
    return [[1], [2]]


def _lerp_terms(*values: Any, weight: Any = None, **_: Any) -> Sequence[Sequence[int]] | None:
    """Linear in both ends, whatever the weight; tensors all passed by keyword may be in any order."""
    return [[0], [1]] if len(values) > 1 or not isinstance(weight, Operand) else None


def _first_term(*values: Any, **_: Any) -> Sequence[Sequence[int]] | None:
    return [[0]] if values else None


def _unary_terms(*_: Any, **__: Any) -> Sequence[Sequence[int]]:
    return [[0]]


def _cast_terms(source: Operand, *args: Any, **kwargs: Any) -> Sequence[Sequence[int]] | None:
    """A cast is linear if it does not round; before any other cast, partial sums are reduced."""
    given = (*args, *kwargs.values())
    if any((isinstance(v, str) and v.startswith("torch.")) or isinstance(v, type(torch.FloatTensor)) for v in given):
        return None  # x.type("torch.LongTensor"), x.type(torch.LongTensor)
    wanted = [v for v in given if isinstance(v, torch.dtype)]
    like = [v.dtype for v in operands_in(*given)]
    target = (wanted or like or [source.dtype])[0]
    return [[0]] if keeps_every_value(source.dtype, target) else None


def _cast_to_terms(target: torch.dtype) -> Terms:
    return lambda source, *_, **__: _cast_terms(source, target)


ALWAYS_NEW = ("neg", "clone")  # never return the input or a view of it

rule(*NONLINEAR, numbers_by_type=True)(pointwise())
rule("add", "sub", numbers_by_type=True)(pointwise(_sum_terms))
rule("mul", numbers_by_type=True)(pointwise(_product_terms))
rule("div", numbers_by_type=True)(pointwise(_quotient_terms))
rule("lerp", numbers_by_type=True)(pointwise(_lerp_terms))
rule("complex", numbers_by_type=True)(pointwise(lambda *_, **__: [[0], [1]]))
rule("ldexp", numbers_by_type=True)(pointwise(_first_term))
rule("addcmul", numbers_by_type=True)(pointwise(lambda *a, **_: [[0], [1, 2]]))
rule("addcdiv", numbers_by_type=True)(pointwise(lambda *_, **named: None if "tensor1" in named else [[0], [1]]))


@rule("where", numbers_by_type=True)
def _where(condition: Operand, *choices: Any, **named: Any) -> Strategies | None:
    # With a condition alone it is nonzero(), whose size depends on the values.
    return pointwise(_where_terms)(condition, *choices, **named) if choices or named else None


@rule("rsub", numbers_by_type=True)
def _rsub(first: Operand, second: Any, alpha: Any = 1) -> Strategies:
    del alpha
    return pointwise(_sum_terms)(first, second)


def _same(linear: Terms, *, fresh: bool = False) -> Callable[..., Strategies | MeshStrategy]:
    """Return a rule for one tensor in and the same layout out; unless `fresh`, it may return the input itself."""

    def find_strategies(source: Operand, *args: Any, **kwargs: Any) -> Strategies | MeshStrategy:
        labels = list(range(source.ndim))
        terms = linear(source, *args, **kwargs)
        # `x.to(other)` uses only the dtype of `other`, which keeps its layout.
        rest = operands_in(*args, *kwargs.values())
        if rest:
            kept = [
                p if (terms and p.is_partial("sum")) or not p.is_partial() else REPLICATE
                for p in source.layout.placements
            ]
            target = source.layout.replace(placements=kept, order=source.layout.order)
            return MeshStrategy((target, *(other.layout for other in rest)), (target,), fresh=False)
        at = index_strategies([source], [labels], [labels], terms=terms)
        return Strategies(at, fresh=fresh, shapes=(source.shape,))  # meta tensors have no `to("cpu")`

    return find_strategies


rule(*(name for name in LINEAR_UNARY if name not in ALWAYS_NEW))(_same(_unary_terms))
rule(*ALWAYS_NEW)(_same(_unary_terms, fresh=True))
rule(*COPIES, "type_as")(_same(_cast_terms))
for _name, _dtype in CASTS.items():
    rule(_name)(_same(_cast_to_terms(_dtype)))
rule("chalf")(_same(lambda *_, **__: None))  # torch has no addition of complex32


@rule("view_as_real")
def _view_as_real(source: Operand) -> Strategies:
    labels = list(range(source.ndim))
    return Strategies(index_strategies([source], [labels], [[*labels, None]], terms=[[0]]), fresh=False)


@rule("view_as_complex")
def _view_as_complex(source: Operand) -> Strategies:
    labels = list(range(source.ndim - 1))
    return Strategies(index_strategies([source], [[*labels, None]], [labels], terms=[[0]]), fresh=False)


@rule("frexp")
def _frexp(input: Operand) -> Strategies:
    labels = list(range(input.ndim))
    return Strategies(index_strategies([input], [labels], [labels, labels]))


@rule("copy", numbers_by_type=True)
def _copy(target: Operand, source: Any, non_blocking: bool = False) -> Strategies:
    """`copy_`: redistribute the source to the layout of the target, partial sums included."""
    del non_blocking
    operands = operands_in(target, source)
    if len(operands) == 2 and keeps_every_value(operands[1].dtype, target.dtype) and _is_sum(target):
        ins, out = broadcast_labels(operands)
        return Strategies(index_strategies(operands, ins, [out], terms=[[0], [1]]))
    return _overwrite(target, source)


def _is_sum(target: Operand) -> bool:
    return not any(p.is_partial() and not p.is_partial("sum") for p in target.layout.placements)


def _overwrite(target: Operand, value: Any) -> Strategies:
    operands = operands_in(target, value)
    ins, out = broadcast_labels(operands)

    def run(context: LocalContext) -> Local | None:
        layout = context.outs[0]
        if not layout.is_partial:
            return None
        return lambda func, args, kwargs: as_partial_value(func(*args, **kwargs), layout, context.rank)

    return Strategies(overwrite_strategies(index_strategies(operands, ins, [out]), target, len(operands)), run=run)


rule("fill", numbers_by_type=True)(_overwrite)
rule("zero")(pointwise(_unary_terms))  # zeros sum to zero

mark_fast(*NONLINEAR, "complex", "ldexp", "add", "sub", "mul", "div", "neg", "clone", "detach")
mark_uniform(
    *NONLINEAR,
    "complex",
    "ldexp",
    "polar",
    "add",
    "sub",
    "mul",
    "div",
    "neg",
    "lerp",
    "addcmul",
    "addcdiv",
    "copy",
    "zero",
    "fill",
)


def _compare_with_none(result: bool) -> Callable[..., Any]:
    """`x == None` is a plain bool, as in torch."""
    return lambda input, other: result if other is None else NotImplemented


composite("eq")(_compare_with_none(False))
composite("ne")(_compare_with_none(True))
