"""Every rule is proved: all placements of its inputs on one mesh dimension, in values and gradients.

Sizes are chosen so that 3 ranks get uneven shards (4, 5, 7), empty ones (1, 2) or only empty ones (0).
"""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import torch.nn.functional as F  # noqa: N812  # torch's own short name
from torch import Tensor

import shardwright.tensor  # noqa: F401  # registers the rules
from shardwright.tensor.base.registry import OPERATORS, canonical_name
from shardwright.tensor.dispatch.cache import FAST
from shardwright.testing import prove

Call = Callable[..., Any]
FULL = os.environ.get("SHARDWRIGHT_BUDGET") == "full"


class Sample(NamedTuple):
    func: Call
    args: tuple[Any, ...]
    kwargs: dict[str, Any]


def S(func: Call, *args: Any, **kwargs: Any) -> Sample:  # noqa: N802  # short, for long tables
    return Sample(func, args, kwargs)


def r(*shape: int, seed: int = 0) -> Tensor:
    """Mixed signs, with nothing near zero or one, where functions have kinks and poles."""
    generator = torch.Generator().manual_seed(seed + sum(shape))
    value = 0.1 + 0.8 * torch.rand(shape, dtype=torch.float64, generator=generator)
    return torch.where(torch.rand(shape, generator=generator) < 0.5, -value, value)


def pos(*shape: int, seed: int = 0) -> Tensor:
    return r(*shape, seed=seed).abs()


def g(*shape: int) -> Tensor:
    """A tensor that requires grad, for operators with inputs that cannot."""
    return pos(*shape).requires_grad_()


def i(*shape: int, low: int = -4, high: int = 5) -> Tensor:
    return torch.randint(low, high, shape, generator=torch.Generator().manual_seed(sum(shape)))


def b(*shape: int) -> Tensor:
    return (torch.arange(torch.Size(shape).numel()) % 3 != 1).reshape(shape)


def c(*shape: int) -> Tensor:
    return torch.complex(r(*shape), r(*shape, seed=1))


def holes(*shape: int) -> Tensor:
    return torch.where(i(*shape) > 1, torch.nan, r(*shape))


def names(text: str) -> list[str]:
    return text.split()


T = torch.Tensor

# Pointwise operators of one tensor: tested on several shapes, and in place if torch has that.
UNARY = names(
    """
    abs acos asin asinh atan atanh ceil celu cos cosh deg2rad digamma elu erf erfc erfinv exp exp2 expm1 floor frac gelu
    hardshrink hardsigmoid hardswish hardtanh i0 isfinite isinf isnan isneginf isposinf isreal leaky_relu lgamma
    log_sigmoid logical_not mish nan_to_num rad2deg reciprocal relu relu6 round selu sgn sigmoid sign signbit silu sin
    sinc sinh softplus softshrink softsign square tan tanh tanhshrink trunc special_erfcx special_i0e special_i1
    special_i1e special_ndtr special_log_ndtr angle neg positive real conj resolve_conj resolve_neg clone contiguous
    detach alias
    """
)
UNARY_POSITIVE = names("log log10 log1p log2 logit rsqrt sqrt special_entr special_ndtri")
BINARY = names(
    """
    add sub mul div atan2 copysign eq ge gt le lt ne float_power floor_divide fmax fmin fmod heaviside hypot isclose
    logaddexp logaddexp2 logical_and logical_or logical_xor maximum minimum nextafter pow remainder rsub xlogy igamma
    igammac special_xlog1py special_zeta special_xlogy
    """
)
BINARY_INTEGER = names("bitwise_and bitwise_left_shift bitwise_or bitwise_right_shift bitwise_xor gcd lcm")
CONVERSIONS = names("cpu half float double bfloat16 cfloat cdouble int long short char byte bool")

OTHERS: dict[str, list[Sample]] = {
    # pointwise
    "acosh": [S(torch.acosh, pos(4, 2) + 2), S(T.acosh_, pos(4, 2) + 2)],
    "bitwise_not": [S(torch.bitwise_not, i(4, 2)), S(torch.bitwise_not, b(4))],
    "clamp": [
        S(torch.clamp, r(4, 2), -0.3, 0.4), S(torch.clamp, r(4, 2), r(2), max=r(4, 1)), S(T.clamp_, r(4), min=0.2),
    ],
    "clamp_max": [S(torch.clamp_max, r(4, 2), 0.1), S(torch.clamp_max, r(4, 2), r(2))],
    "clamp_min": [S(torch.clamp_min, r(4, 2), 0.1), S(torch.clamp_min, r(4, 2), r(2))],
    "ldexp": [S(torch.ldexp, r(4, 2), i(2, low=0))],
    "masked_fill": [
        S(T.masked_fill, r(4, 2), b(4, 2), 1.5),
        S(T.masked_fill, r(4, 2), b(2), torch.tensor(2.0, dtype=torch.float64)),
        S(T.masked_fill_, r(4, 2), b(4, 1), 0.0),
    ],
    "mvlgamma": [S(torch.mvlgamma, pos(4, 2) + 2, 2)],
    "polygamma": [S(torch.polygamma, 1, pos(4, 2))],
    "polar": [S(torch.polar, pos(4, 2), r(4, 2))],
    "complex": [S(torch.complex, r(4, 2), r(4, 2, seed=1))],
    "threshold": [S(torch.threshold, r(4, 2), 0.1, 3.0)],
    "frexp": [S(torch.frexp, r(4, 2).requires_grad_(False))],
    "isin": [S(torch.isin, i(4), i(4, low=0)), S(torch.isin, i(4, 2), i(5))],
    "rdiv": [S(T.__rtruediv__, pos(4, 2), 2.0), S(T.__rtruediv__, pos(4, 2), pos(2, seed=1))],
    "imag": [S(torch.imag, c(4, 2))],
    "where": [
        S(torch.where, b(4), input=r(4), other=r(4, seed=1)), S(torch.where, b(4, 2), r(4, 2), r(2)),
        S(torch.where, b(4, 1), r(2), 0.0), S(T.where, r(4), b(4), r(4, seed=1)), S(torch.where, b(4)),
    ],
    "lerp": [
        S(torch.lerp, r(4, 2), end=r(2), weight=0.3), S(torch.lerp, r(4, 2), r(2), 0.3),
        S(torch.lerp, r(4), r(4, seed=1), r(4, seed=2)), S(T.lerp_, r(4), r(4, seed=1), 0.2),
    ],
    "addcmul": [
        S(torch.addcmul, r(4), tensor1=r(4, seed=1), tensor2=r(4, seed=2)),
        S(torch.addcmul, r(4, 2), r(4, 1), r(2), value=0.5), S(T.addcmul_, r(4), r(4, seed=1), r(1)),
    ],
    "addcdiv": [S(torch.addcdiv, r(4, 2), r(4, 1), r(2), value=0.5), S(T.addcdiv_, r(4), r(4, seed=1), r(1))],
    "to": [
        S(T.to, r(4, 2), torch.float32), S(T.to, r(4), torch.int64), S(T.to, i(4), torch.float64),
        S(T.to, r(4, 2), i(3)), S(T.to, r(4), dtype=torch.bool), S(T.to, r(4), "cpu"),
    ],
    "type": [S(T.type, r(4), torch.float32), S(T.type, r(4), "torch.LongTensor"), S(T.type, r(4), dtype=torch.int32)],
    "type_as": [S(T.type_as, r(4, 2), i(3)), S(T.type_as, r(4), r(4).float())],
    "view_as_real": [S(torch.view_as_real, c(4, 2))],
    "view_as_complex": [S(torch.view_as_complex, r(4, 2))],
    "copy": [S(T.copy_, r(4, 2), r(2)), S(T.copy_, r(4, 2), i(4, 1)), S(T.copy_, i(4), r(4) * 9)],
    "fill": [S(T.fill_, r(4, 2), 2.0), S(T.fill_, r(4, 2), torch.tensor(2.0, dtype=torch.float64))],
    "zero": [S(T.zero_, r(4, 2))],
    # contractions
    "mm": [
        S(torch.mm, r(4, 5), mat2=r(5, 2)), S(torch.mm, r(4, 5), r(5, 2)), S(torch.mm, r(4, 0), r(0, 2)),
        S(torch.mm, i(4, 5), i(5, 1)),
    ],
    "bmm": [S(torch.bmm, r(2, 4, 5), r(2, 5, 1))],
    "mv": [S(torch.mv, r(4, 5), r(5))],
    "dot": [S(torch.dot, r(4), r(4, seed=1))],
    "vdot": [S(torch.vdot, c(4), c(4)), S(torch.vdot, r(4), r(4, seed=1))],
    "outer": [S(torch.outer, r(4), r(2))],
    "ger": [S(torch.ger, r(4), r(2))],
    "matmul": [
        S(torch.matmul, r(4, 5), other=r(5, 2)),
    ] + [
        S(torch.matmul, *shapes)
        for shapes in [(r(4), r(4, seed=1)), (r(4, 5), r(5)), (r(4), r(4, 2)), (r(4, 5), r(5, 2)),
        (r(2, 4, 5), r(5, 2)), (r(4, 1, 2, 5), r(3, 5, 2)), (r(1, 4, 5), r(4, 5, 2)), (r(5), r(4, 5, 2)),
        (r(1, 2, 5), r(1, 5, 4))]
    ],
    "linalg_matmul": [S(torch.linalg.matmul, r(4, 5), r(5, 2))],
    "rmatmul": [S(T.__rmatmul__, r(5, 2), r(4, 5))],
    "linear": [
        S(F.linear, r(4, 5), r(2, 5), r(2)), S(F.linear, r(2, 4, 5), r(7, 5)), S(F.linear, r(5), r(4, 5), bias=r(4)),
        S(F.linear, r(4, 5), r(5)),
    ],
    "addmm": [
        S(torch.addmm, r(4, 2), mat1=r(4, 5), mat2=r(5, 2)),
        S(torch.addmm, r(4, 2), r(4, 5), r(5, 2), beta=0.5, alpha=2), S(torch.addmm, r(2), r(4, 5), r(5, 2)),
        S(torch.addmm, r(4, 1), r(4, 5), r(5, 2)), S(T.addmm_, r(4, 2), r(4, 5), r(5, 2)),
    ],
    "addmv": [S(torch.addmv, r(4), r(4, 5), r(5)), S(torch.addmv, r(1), r(4, 5), r(5), alpha=0.5)],
    "addbmm": [S(torch.addbmm, r(4, 2), r(2, 4, 5), r(2, 5, 2))],
    "baddbmm": [S(torch.baddbmm, r(2, 4, 1), r(2, 4, 5), r(2, 5, 4), beta=2)],
    "addr": [S(torch.addr, r(4, 2), r(4), r(2))],
    "einsum": [
        S(torch.einsum, equation, *tensors) for equation,
        *tensors in [("ij,jk->ik", r(4, 5), r(5, 2)), ("bij,bj", r(2, 4, 5), r(2, 5)),
        ("...ij,jk->...ik", r(2, 4, 5), r(5, 1)), ("ij->", r(4, 2)), ("ij->ji", r(4, 2)),
        ("i,j,k->ijk", r(4), r(2), r(1)), ("ii->i", r(4, 4)), ("i...,...->...i", r(4, 2), r(2)),
        ("ij,ij->j", r(4, 1), r(4, 5))]
    ] + [S(torch.einsum, "ij,j->i", [r(4, 2), r(2)])],
    "cross": [
        S(torch.cross, r(4, 3), r(4, 3, seed=1), dim=1), S(torch.cross, r(3, 4), r(3, 4, seed=1), dim=-2),
        S(torch.cross, r(4, 3), r(1, 3), -1),
    ],
    "linalg_cross": [S(torch.linalg.cross, r(3, 3), r(3, 3, seed=1)), S(torch.linalg.cross, r(3, 4), r(3, 1), dim=0)],
    # reductions
    **{
        name: [S(getattr(torch, name), value()), S(getattr(torch, name), value(), dim=0),
        S(getattr(torch, name), value(), -1, True), S(getattr(torch, name), r())] for name,
        value in {"sum": lambda: r(4, 5), "mean": lambda: r(4, 5), "nansum": lambda: holes(4, 5)}.items()
    },
    "amax": [
        S(T.amax, r(7), dim=()), S(torch.amax, r(7, 2), dim=0), S(torch.amax, r(7, 2), (0, 1), True),
        S(torch.amax, i(7, 4)), S(torch.amax, r(2, 4), 1), S(T.amax, r(0, 4), 1),
    ],
    "amin": [S(torch.amin, r(7, 2), dim=0), S(torch.amin, r(7, 2), (0, 1), keepdim=True), S(torch.amin, i(4))],
    "prod": [
        S(torch.prod, r(4, 2)), S(torch.prod, r(4, 2), 0), S(torch.prod, i(4, 2), -1, keepdim=True),
        S(torch.prod, r(0)),
    ],
    "any": [
        S(torch.any, b(4, 2)), S(torch.any, b(4, 2), 0), S(torch.any, r(4, 2), dim=1, keepdim=True),
        S(torch.any, b(0, 2), 0), S(torch.any, i(4, 2).to(torch.uint8), 0),
    ],
    "all": [
        S(torch.all, b(4, 2)), S(torch.all, b(4, 2), 0), S(torch.all, r(4, 2), dim=1, keepdim=True),
        S(torch.all, b(0, 2), 0), S(torch.all, i(4, 2).to(torch.uint8), 0),
    ],
    "count_nonzero": [
        S(torch.count_nonzero, i(4, 2)), S(torch.count_nonzero, i(4, 2), 0),
        S(torch.count_nonzero, b(4, 2), dim=(0, 1)),
    ],
    "argmax": [
        S(torch.argmax, i(4, 5).double(), 0), S(torch.argmax, r(4, 5), dim=-1, keepdim=True), S(torch.argmax, r(4, 5)),
    ],
    "argmin": [S(torch.argmin, i(4, 5).double(), 0), S(torch.argmin, r(4, 5), dim=-1, keepdim=True)],
    "median": [S(torch.median, r(4, 5), 0), S(torch.median, r(4, 5), dim=-1, keepdim=True), S(torch.median, r(4))],
    "nanmedian": [S(torch.nanmedian, holes(4, 5), 0), S(torch.nanmedian, r(4, 5), -1, True)],
    "mode": [S(torch.mode, r(4, 5), 0), S(torch.mode, i(4, 5), 1, True)],
    "cummax": [S(torch.cummax, r(4, 5), 0), S(torch.cummax, r(4, 5), dim=-1)],
    "cummin": [S(torch.cummin, r(4, 5), 0)],
    "logcumsumexp": [S(torch.logcumsumexp, r(4, 5), 0)],
    "cumprod": [S(torch.cumprod, r(4, 5), 0), S(T.cumprod_, r(4, 5), 1)],
    "cumsum": [
        S(torch.cumsum, r(4, 5), 0), S(torch.cumsum, i(4, 5), dim=-1, dtype=torch.float64), S(T.cumsum_, r(4, 5), 1),
    ],
    "max": [
        S(torch.max, r(7, 2)), S(torch.max, r(7, 2), 0), S(T.max, r(7, 2), dim=-1, keepdim=True),
        S(torch.max, r(4, 2), r(2)),
    ],
    "min": [
        S(torch.min, r(7, 2)), S(torch.min, r(7, 2), 0), S(T.min, r(7, 2), dim=-1, keepdim=True),
        S(torch.min, r(4, 2), other=r(2)),
    ],
    "softmax": [
        S(torch.softmax, r(4, 5), 0), S(F.softmax, r(4, 5), dim=-1),
        S(torch.softmax, r(4, 5), 1, dtype=torch.float32), S(T.softmax, r(4), 0),
    ],
    "log_softmax": [S(torch.log_softmax, r(4, 5), 0), S(F.log_softmax, r(4, 5), dim=-1)],
    "softmin": [S(F.softmin, r(4, 5), 0), S(F.softmin, r(4, 5), dim=-1)],
    # shapes
    "permute": [
        S(torch.permute, r(4, 2, 5), (2, 0, 1)), S(T.permute, r(4, 2, 5), -1, 0, 1),
        S(torch.permute, r(4, 2), dims=(1, 0)),
    ],
    "transpose": [
        S(torch.transpose, r(4, 2, 5), 0, -1), S(torch.transpose, r(), 0, -1),
        S(T.transpose, r(4, 2), dim0=0, dim1=1), S(T.transpose_, r(4, 4), 0, 1),
    ],
    "t": [S(torch.t, r(4, 2)), S(torch.t, r(4)), S(T.t_, r(4, 2))],
    "adjoint": [S(torch.adjoint, r(2, 4, 5)), S(torch.adjoint, c(4, 5))],
    "movedim": [S(torch.movedim, r(4, 2, 5), 0, -1), S(torch.movedim, r(4, 2, 5), (0, 1), (1, 2))],
    "unsqueeze": [
        S(torch.unsqueeze, r(4, 2), 1), S(torch.unsqueeze, r(4, 2), -1), S(torch.unsqueeze, r(), 0),
        S(T.unsqueeze_, r(4), 0),
    ],
    "squeeze": [
        S(torch.squeeze, r(4, 1, 5)), S(torch.squeeze, r(4, 1, 2), 1), S(torch.squeeze, r(4, 2), 0),
        S(torch.squeeze, r(1, 4, 1), (0, -1)), S(T.squeeze_, r(4, 1)), S(torch.squeeze, r()),
    ],
    "expand": [
        S(T.expand, r(4, 1), 4, 5), S(T.expand, r(4, 1), (2, -1, 3)), S(T.expand, r(1), 1), S(T.expand, r(), 4),
        S(T.expand, r(4, 2), size=(4, 2)),
    ],
    "view": [
        S(T.view, r(4, 6), 4, 2, 3), S(T.view, r(4, 6), (24,)), S(T.view, r(4, 6), 2, -1),
        S(T.view, r(4, 5), torch.int64), S(T.view, r(4, 6), torch.float32), S(T.view, r(1, 4, 1), 4),
        S(T.view, r(), 1), S(T.view, r(0, 4), 4, 0), S(T.view, r(6, 4), 2, 3, 4), S(T.view, r(7, 3), 21),
        S(T.view, r(4, 6), dtype=torch.int64),
    ],
    "reshape": [
        S(torch.reshape, r(4, 6), (3, 8)), S(torch.reshape, r(6, 4).t(), (24,)), S(T.reshape, r(4, 5), -1),
        S(torch.reshape, r(4, 6), shape=(24,)), S(torch.reshape, r(12), (12, 1)),
        S(torch.reshape, r(5, 2, 1), (1, 10)),
    ],
    "_unsafe_view": [S(torch.ops.aten._unsafe_view, r(4, 6), (24,))],
    "view_copy": [S(torch.view_copy, r(4, 6), (24,))],
    "flatten": [
        S(torch.flatten, r(4, 2, 5)), S(torch.flatten, r(4, 2, 5), 1),
        S(torch.flatten, r(4, 2, 5), start_dim=0, end_dim=-2), S(torch.flatten, r()), S(torch.flatten, r(6, 4).t()),
    ],
    "unflatten": [
        S(torch.unflatten, r(4, 6), 1, (2, 3)), S(T.unflatten, r(6, 4), 0, (-1, 2)),
        S(torch.unflatten, r(6, 4), -1, (2, 2)),
    ],
    "ravel": [S(torch.ravel, r(4, 5)), S(torch.ravel, r(6, 4).t())],
    "view_as": [S(T.view_as, r(4, 2), r(4, 2, seed=1))],
    "reshape_as": [S(T.reshape_as, r(4, 2), r(4, 2, seed=1))],
    # creation
    "zeros_like": [S(torch.zeros_like, r(4, 2)), S(torch.zeros_like, i(4), dtype=torch.float64)],
    "ones_like": [S(torch.ones_like, r(4, 2)), S(torch.ones_like, r(4, 2), dtype=torch.int64)],
    "full_like": [S(torch.full_like, r(4, 2), 3.0), S(torch.full_like, r(4), fill_value=2)],
    "new_zeros": [S(T.new_zeros, r(4, 2), (2, 3)), S(T.new_zeros, r(4), 2, 3)],
    "new_ones": [S(T.new_ones, r(4, 2), (2, 3)), S(T.new_ones, r(4), size=(2, 3))],
    "new_full": [S(T.new_full, r(4, 2), (2, 3), 4.0), S(T.new_full, r(4), (2,), fill_value=1)],
    # indexing, joining, scattering
    "__getitem__": [
        S(T.__getitem__, r(4, 5, 2), index)
        for index in (0, -1, slice(1, 3), slice(None, None, 2), (slice(None), 2), (..., -1), (None, slice(0, 2)),
        (slice(None), None, 1), slice(2, 2), (slice(None), i(3, low=0)), (i(4, low=0, high=4), i(4, low=0)), [0, 2],
        b(4))
    ],
    "argsort": [S(torch.argsort, r(4, 5), 0), S(torch.argsort, r(4, 5), dim=-1, descending=True)],
    "bucketize": [S(torch.bucketize, r(4, 2), torch.linspace(-1, 1, 5, dtype=torch.float64))],
    "cat": [
        S(torch.cat, [r(4, 2), r(1, 2)]), S(torch.cat, [r(4, 2), r(4, 5)], dim=-1),
        S(torch.cat, (r(4, 2), r(4, 0), r(4, 1)), 1), S(torch.cat, [r(4, 2), i(4, 2)]),
    ],
    "stack": [
        S(torch.stack, [r(4, 2), r(4, 2, seed=1)]), S(torch.stack, [r(4, 2), r(4, 2, seed=1)], dim=-1),
        S(torch.stack, [r(4)] * 4, 1),
    ],
    "chunk": [S(torch.chunk, r(4, 5), 2), S(torch.chunk, r(4, 5), 3, dim=-1)],
    "unsafe_chunk": [S(torch.unsafe_chunk, r(4, 5), 2, 1)],
    "split": [S(torch.split, r(4, 5), 3), S(T.split, r(4, 5), [2, 0, 3], dim=-1)],
    "split_with_sizes": [S(torch.split_with_sizes, r(4, 5), [1, 3]), S(T.split_with_sizes, r(4, 5), (2, 3), -1)],
    "unsafe_split": [S(torch.unsafe_split, r(4, 5), 3)],
    "unsafe_split_with_sizes": [S(torch.unsafe_split_with_sizes, r(4, 5), [1, 3])],
    "tensor_split": [S(torch.tensor_split, r(4, 5), 3), S(torch.tensor_split, r(4, 5), (1, 3), dim=-1)],
    "unbind": [S(torch.unbind, r(4, 2)), S(torch.unbind, r(4, 2), -1)],
    "select": [S(torch.select, r(4, 5), 0, 2), S(torch.select, r(4, 5), -1, -1)],
    "narrow": [
        S(torch.narrow, r(4, 5), 0, 1, 2), S(torch.narrow, r(4, 5), -1, 0, 0), S(torch.narrow, r(4, 5), 1, 0, 5),
    ],
    "constant_pad_nd": [
        S(torch.constant_pad_nd, r(4, 2), (1, 2)), S(torch.constant_pad_nd, r(4, 2), (1, 0, 0, 2), 3.0),
    ],
    "pad": [
        S(F.pad, r(4, 2), (1, 2)), S(F.pad, r(4, 2), (0, 0, 1, 1), value=3.0),
        S(F.pad, r(1, 4, 5), (1, 2), mode="reflect"), S(F.pad, r(4, 5), (0, -1)),
    ],
    "diag": [S(torch.diag, r(4)), S(torch.diag, r(4, 5), 1)],
    "diag_embed": [S(torch.diag_embed, r(4, 2)), S(torch.diag_embed, r(4, 2), 1, 0, 1)],
    "diagflat": [S(torch.diagflat, r(4)), S(torch.diagflat, r(2, 2), 1)],
    "diagonal": [S(torch.diagonal, r(4, 5)), S(torch.diagonal, r(4, 5, 2), 1, 0, 2)],
    "linalg_diagonal": [
        S(torch.linalg.diagonal, r(2, 4, 5)), S(torch.linalg.diagonal, r(4, 5, 2), offset=1, dim1=0, dim2=1),
    ],
    "flip": [S(torch.flip, r(4, 5), (0,)), S(T.flip, r(4, 5), 0, 1)],
    "fliplr": [S(torch.fliplr, r(4, 5))],
    "flipud": [S(torch.flipud, r(4, 5))],
    "roll": [
        S(torch.roll, r(4, 5), 1), S(torch.roll, r(4, 5), (1, 2), (0, 1)), S(torch.roll, r(4, 5), shifts=-1, dims=1),
    ],
    "rot90": [S(torch.rot90, r(4, 5)), S(torch.rot90, r(4, 5, 2), 2, (1, 2))],
    "repeat": [S(T.repeat, r(4, 2), 2, 1), S(T.repeat, r(4), (2, 3))],
    "repeat_interleave": [
        S(torch.repeat_interleave, r(4, 2), 2, 0), S(torch.repeat_interleave, r(4, 2), 3, dim=-1),
        S(torch.repeat_interleave, r(4), 2),
    ],
    "tril": [S(torch.tril, r(4, 5)), S(torch.tril, r(2, 4, 5), -1), S(T.tril_, r(4, 5))],
    "triu": [S(torch.triu, r(4, 5)), S(torch.triu, r(2, 4, 5), diagonal=1)],
    "unfold": [S(T.unfold, r(4, 5), 1, 2, 1), S(T.unfold, r(4, 5), 0, 2, 2)],
    "one_hot": [S(F.one_hot, i(4, 2, low=0), 5)],
    "sort": [
        S(torch.sort, r(4, 5)), S(torch.sort, r(4, 5), 0, descending=True),
        S(torch.sort, r(4, 5), stable=True, dim=-1),
    ],
    "msort": [S(torch.msort, r(4, 5))],
    "topk": [S(torch.topk, r(4, 5), 2), S(torch.topk, r(4, 5), k=1, dim=0, largest=False)],
    "kthvalue": [S(torch.kthvalue, r(4, 5), 2), S(torch.kthvalue, r(4, 5), 1, 0, True)],
    "take": [S(torch.take, r(4, 2), i(3, low=0))],
    "gather": [
        S(torch.gather, r(4, 5), 1, i(4, 3, low=0)), S(torch.gather, r(4, 5), 0, i(2, 5, low=0, high=4)),
        S(torch.gather, r(4, 5), dim=1, index=i(4, 5, low=0)),
    ],
    "index_select": [
        S(torch.index_select, r(4, 5), 0, i(7, low=0, high=4)), S(torch.index_select, r(4, 5), -1, i(2, low=0)),
    ],
    "index_add": [
        S(torch.index_add, r(4, 5), 0, torch.tensor([3, 0]), r(2, 5)),
        S(torch.index_add, r(4, 5), 1, torch.tensor([3, 3]), r(4, 2), alpha=2),
        S(T.index_add_, r(4, 5), 0, torch.tensor([3, 3]), r(2, 5)),
    ],
    "index_copy": [
        S(torch.index_copy, r(4, 5), 0, torch.tensor([3, 0]), r(2, 5)),
        S(T.index_copy_, r(4, 5), 1, torch.tensor([2]), r(4, 1)),
    ],
    "index_fill": [
        S(torch.index_fill, r(4, 5), 0, torch.tensor([3, 0]), 2.0),
        S(T.index_fill_, r(4, 5), 1, torch.tensor([3, 0]), 0.0),
    ],
    "index_put": [
        S(torch.index_put, r(4, 5), (torch.tensor([0, 3]),), r(2, 5)),
        S(torch.index_put, r(4, 5), (torch.tensor([3, 3]),), r(2, 5), accumulate=True),
        S(torch.index_put, r(4, 5), (torch.tensor([0, 3]), torch.tensor([1, 1])), r(2)),
        S(T.index_put_, r(4, 5), (torch.tensor([0, 2]),), r(5)),
    ],
    "index_reduce": [S(torch.index_reduce, r(4, 5), 0, torch.tensor([3, 0]), r(2, 5), "amax")],
    "scatter": [
        S(torch.scatter, r(4, 5), 1, i(4, 2, low=0, high=2).cumsum(1), r(4, 2)),
        S(torch.scatter, r(4, 5), 0, i(1, 5, low=0, high=4), 2.0), S(T.scatter_, r(4, 5), 1, i(4, 1, low=0), r(4, 1)),
    ],
    "scatter_add": [
        S(torch.scatter_add, r(4, 5), 1, i(4, 2, low=0), r(4, 2)),
        S(torch.scatter_add, r(4, 5), 0, i(2, 5, low=0, high=4), r(2, 5)),
        S(T.scatter_add_, r(4, 5), 1, i(4, 5, low=0), r(4, 5)),
    ],
    "scatter_reduce": [
        S(torch.scatter_reduce, r(4, 5), 1, i(4, 2, low=0), r(4, 2), "sum"),
        S(torch.scatter_reduce, r(4, 5), 0, i(2, 5, low=0, high=4), r(2, 5), reduce="amax"),
    ],
    # layers
    "embedding": [
        S(torch.embedding, r(5, 2), i(4, 2, low=0)), S(torch.embedding, r(5, 4), i(7, low=0), padding_idx=1),
        S(torch.embedding, r(5, 4), i(7, low=0), 2, True),
    ],
    "layer_norm": [
        S(F.layer_norm, r(4, 5), (5,)), S(F.layer_norm, r(2, 4, 5), (5,), r(5), r(5, seed=1)),
        S(F.layer_norm, r(4, 2, 5), (2, 5), weight=r(2, 5), eps=1e-3), S(torch.layer_norm, r(4, 5), (5,), r(5), r(5)),
    ],
    "rms_norm": [S(F.rms_norm, r(4, 5), (5,)), S(F.rms_norm, r(2, 4, 5), (5,), weight=r(5))],
    "group_norm": [S(F.group_norm, r(4, 6), 3), S(F.group_norm, r(4, 6, 2), 2, r(6), r(6, seed=1))],
    "scaled_dot_product_attention": [
        S(F.scaled_dot_product_attention, r(4, 2, 2), r(4, 5, 2), r(4, 5, 3)),
        S(F.scaled_dot_product_attention, *[r(1, 4, 5, 2)] * 3, is_causal=True),
        S(F.scaled_dot_product_attention, r(1, 4, 5, 2), r(1, 4, 5, 2, seed=1), r(1, 4, 5, 2, seed=2),
        attn_mask=b(5, 5) | torch.eye(5, dtype=torch.bool), scale=0.3),
    ],
    "cosine_similarity": [
        S(F.cosine_similarity, r(4, 5), r(4, 5, seed=1)), S(F.cosine_similarity, r(4, 5), r(1, 5), dim=-1),
    ],
    # losses
    **{
        name: [S(getattr(F, name), r(4, 2), target(4, 2)),
        S(getattr(F, name), r(4, 2), target(4, 2), reduction="sum"),
        S(getattr(F, name), r(4, 2), target(4, 2), reduction="none")] for name,
        target in {"mse_loss": pos, "l1_loss": lambda *s: pos(*s) + 1, "smooth_l1_loss": pos, "huber_loss": pos,
        "poisson_nll_loss": pos, "binary_cross_entropy_with_logits": pos,
        "hinge_embedding_loss": lambda *s: r(*s, seed=3).sign()}.items()
    },
    "binary_cross_entropy": [
        S(F.binary_cross_entropy, pos(4, 2), pos(4, 2, seed=1)),
        S(F.binary_cross_entropy, g(4, 2), pos(4, 2, seed=1), weight=pos(2), reduction="sum"),
    ],
    "kl_div": [S(F.kl_div, r(4, 2), pos(4, 2), reduction=how) for how in ("batchmean", "sum", "none")],
    "soft_margin_loss": [
        S(F.soft_margin_loss, g(4, 2), r(4, 2, seed=3).sign(), reduction=how) for how in ("mean", "sum", "none")
    ],
    "margin_ranking_loss": [
        S(F.margin_ranking_loss, r(4), r(4, seed=1), r(4, seed=2).sign()),
        S(F.margin_ranking_loss, r(4), r(4, seed=1), r(4, seed=2).sign(), margin=0.3, reduction="sum"),
    ],
    "cross_entropy_loss": [
        S(torch._C._nn.cross_entropy_loss, r(4, 5), i(4, low=0), None, 1, -100, 0.0),
        S(torch._C._nn.cross_entropy_loss, r(4, 5, 2), i(4, 2, low=0), None, 2, -100, 0.1),
        S(torch._C._nn.cross_entropy_loss, r(4, 5), pos(4, 5), None, 1, -100, 0.0),
        S(torch._C._nn.cross_entropy_loss, g(7, 5), i(7, low=0), pos(5), 1, 2, 0.0),
    ],
    "nll_loss_nd": [
        S(torch._C._nn.nll_loss_nd, r(4, 5), i(4, low=0), None, 1, -100),
        S(torch._C._nn.nll_loss_nd, g(7, 5), i(7, low=0), pos(5), 1, 2),
        S(torch._C._nn.nll_loss_nd, r(4, 5), i(4, low=0), None, 0, -100),
        S(torch._C._nn.nll_loss_nd, r(4, 5), i(4, low=0), None, 2, -100),
    ],
    "nll_loss2d": [S(torch._C._nn.nll_loss2d, r(4, 5, 2, 1), i(4, 2, 1, low=0), None, 1, -100)],
}  # fmt: skip
# Their values are arbitrary: only shapes and dtypes can be proved.
SHAPES_ALONE = {
    "empty_like": [S(torch.empty_like, r(4, 2)), S(torch.empty_like, r(4), dtype=torch.int64)],
    "new_empty": [S(T.new_empty, r(4), (2, 3)), S(T.new_empty, r(4), 2)],
    "new_empty_strided": [S(T.new_empty_strided, r(4), (2, 3), (1, 2))],
}
# Proved elsewhere, with the reason.
ELSEWHERE = {
    "cuda": "needs a device; its rule is that of cpu",
    "__setitem__": "returns nothing; test_index.py compares what it has written",
} | dict.fromkeys(
    names(
        """
        alpha_dropout bernoulli cauchy dropout exponential feature_alpha_dropout feature_dropout geometric
        log_normal normal rand_like randint_like randn_like random uniform
        """
    ),
    "random: its numbers are ours, not torch's; tests/tensor/random compares layouts with each other",
)


def find(name: str) -> list[Call]:
    """Return the operator as a torch function, and as an in-place method."""
    if name == "alias":
        return [torch.ops.aten.alias]
    if name in CONVERSIONS:
        return [getattr(T, name)]
    if name.startswith("special_"):
        return [getattr(torch.special, name.removeprefix("special_"))]
    namespaces = (torch, F, torch.Tensor)
    spelled = {"log_sigmoid": "logsigmoid"}.get(name, name)
    found = next(getattr(namespace, spelled) for namespace in namespaces if hasattr(namespace, spelled))
    inplace = getattr(T, f"{spelled}_", None)
    return [found] if inplace is None else [found, inplace]


def generated(name: str) -> Iterator[Sample]:
    make = pos if name in UNARY_POSITIVE else r
    for func in find(name):
        inplace = canonical_name(func)[1]
        if name in (*UNARY, *UNARY_POSITIVE):
            scale = 9 if name in ("trunc", "round", "ceil", "floor") else 1  # otherwise all values would be zero
            yield from (S(func, scale * make(*shape)) for shape in ((4, 2), (), (0, 3)))
        elif name in BINARY:
            yield S(func, pos(4, 2), pos(2, seed=1))
            if name == "special_zeta":  # NaN below 1
                yield S(func, 1 + pos(4, 2), pos(2, seed=1))
            if not inplace:
                yield S(func, pos(4, 1), pos(1, 5, seed=1))
                yield S(func, pos(4, 2), pos(4, 2, seed=1))
            if name in ("add", "sub", "mul", "div"):
                yield S(func, r(4, 2), 2)
                yield S(func, r(4, 2), other=r(2))
        elif name in BINARY_INTEGER:
            yield S(func, 64 * i(4, 2, low=0) + 5, i(2, low=0))
        else:
            yield S(func, (r(4, 2) * 9).abs() if name == "byte" else r(4, 2) * 9)


def _samples_of_other_files() -> dict[str, list[Sample]]:
    """Return the samples of the other files: their `SAMPLES`, by canonical name of the operator."""
    found: dict[str, list[Sample]] = {}
    for path in sorted(Path(__file__).parent.glob("samples_*.py")):
        spec = importlib.util.spec_from_file_location(path.stem, path)
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        for name, samples in module.SAMPLES.items():
            found.setdefault(name, []).extend(Sample(*sample) for sample in samples)
    return found


OF_OTHER_FILES = _samples_of_other_files()
GENERATED = (*UNARY, *UNARY_POSITIVE, *BINARY, *BINARY_INTEGER, *CONVERSIONS)
RULES = sorted(name for name, op in OPERATORS.items() if op.rule is not None)


# The rules of losses answer for torch's own functions, which take the reduction as a number: 0 is "none".
UNREDUCED: dict[str, list[Sample]] = {
    **{
        name: [S(getattr(torch._C._nn, name), r(4, 2), r(4, 2, seed=1), 0)]
        for name in ("mse_loss", "l1_loss", "smooth_l1_loss", "huber_loss")
    },
}

# Their samples reduce, which the rules decline: `test_loss.py` compares every placement of these on ranks.
REDUCED = names(
    """
    soft_margin_loss kl_div binary_cross_entropy binary_cross_entropy_with_logits poisson_nll_loss hinge_embedding_loss
    margin_ranking_loss
    """
)


def samples_of(name: str) -> list[Sample]:
    others = (OTHERS, UNREDUCED, OF_OTHER_FILES)
    return [
        *(generated(name) if name in GENERATED else ()),
        *(sample for some in others for sample in some.get(name, ())),
    ]


PROVED_HERE = [name for name in RULES if name not in SHAPES_ALONE and name not in ELSEWHERE]
# Slow ones: all of them with the full budget, else every third.
SELECTED = [name for number, name in enumerate(PROVED_HERE) if FULL or number % 3 == 0 or name not in OF_OTHER_FILES]


def test_every_rule_has_samples() -> None:
    assert [name for name in PROVED_HERE if not samples_of(name)] == []


@pytest.mark.filterwarnings("ignore:index_reduce", "ignore:ComplexHalf")
@pytest.mark.parametrize("name", SELECTED)
def test_rule_is_correct(name: str) -> None:
    proved = 0
    for func, args, kwargs in samples_of(name):
        assert canonical_name(func)[0] == name
        proof = prove(func, *args, **kwargs)
        assert not proof.wrong, f"{[tuple(a.shape) if isinstance(a, Tensor) else a for a in args]} {proof}"
        proved += len(proof.proved)
    assert proved or name in REDUCED, f"{name}: no sample has a placement that the rule accepts"


@pytest.mark.parametrize("name", SHAPES_ALONE)
def test_rule_with_arbitrary_values_gives_correct_shapes(name: str) -> None:
    for func, args, kwargs in SHAPES_ALONE[name]:
        proof = prove(func, *args, values=False, **kwargs)
        assert not proof.wrong, proof


def test_rules_proved_elsewhere_are_registered() -> None:
    assert set(ELSEWHERE) <= set(RULES)


def test_fast_path_operators_return_one_new_tensor() -> None:
    """The dispatcher tags these results unchecked, so they must not alias other tensors."""
    tried = 0
    for name in RULES:
        for func, args, kwargs in samples_of(name):
            if func in FAST and not kwargs:
                result = func(*(value.clone() if isinstance(value, Tensor) else value for value in args))
                assert type(result) is Tensor, name
                assert all(func(*args) is not value for value in args), name
                tried += 1
    assert tried > 100
