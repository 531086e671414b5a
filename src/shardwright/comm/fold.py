"""Local reduction of tensors of any dtype, in rank order, for dtypes and operations that backends lack.

Low-precision floats are accumulated in float32 and rounded once; unsigned integers wrap as in two's complement; the sum
of booleans is `or`, their product `and`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Literal, get_args

import torch
from torch import Tensor

from shardwright.errors import ArgumentTypeError

__all__ = ["ReduceOp", "check", "fold"]

ReduceOp = Literal["sum", "avg", "max", "min", "product", "band", "bor", "bxor"]

_FLOAT8 = (
    torch.float8_e4m3fn,
    torch.float8_e4m3fnuz,
    torch.float8_e5m2,
    torch.float8_e5m2fnuz,
    torch.float8_e8m0fnu,
)
_WIDER = {
    torch.float16: torch.float32,
    torch.bfloat16: torch.float32,
    torch.complex32: torch.complex64,
    torch.uint16: torch.int32,
    torch.uint32: torch.int64,
    torch.uint64: torch.int64,
    **dict.fromkeys(_FLOAT8, torch.float32),
}
_NATURAL = (torch.float32, torch.float64, torch.complex64, torch.complex128, torch.bool)
_INTEGERS = (torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)
_BITWISE = ("band", "bor", "bxor")

# uint64 keeps its order as int64 once the top bit is flipped.
_TOP_BIT = -(1 << 63)


def _maximum(total: Tensor, piece: Tensor) -> Tensor:
    return torch.maximum(total, piece, out=total)


def _minimum(total: Tensor, piece: Tensor) -> Tensor:
    return torch.minimum(total, piece, out=total)


_STEP: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "sum": Tensor.add_,
    "avg": Tensor.add_,
    "product": Tensor.mul_,
    "max": _maximum,
    "min": _minimum,
    "band": Tensor.bitwise_and_,
    "bor": Tensor.bitwise_or_,
    "bxor": Tensor.bitwise_xor_,
}
_BOOL_STEP: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    **dict.fromkeys(("sum", "max", "bor"), Tensor.logical_or_),
    **dict.fromkeys(("product", "min", "band"), Tensor.logical_and_),
    "bxor": Tensor.logical_xor_,
}


def check(dtype: torch.dtype, op: str) -> None:
    """Raise if a reduction is undefined: `max` of complex numbers, `avg` of integers, bitwise operations on floats.

    >>> check(torch.int64, "avg")
    Traceback (most recent call last):
    shardwright.errors.ArgumentTypeError: cannot reduce torch.int64 by 'avg': an average needs a float ...
    """
    if op not in _STEP:
        raise ArgumentTypeError(f"unknown reduction {op!r}: expected one of {', '.join(get_args(ReduceOp))}")
    rule = ""
    if dtype not in _WIDER and dtype not in _NATURAL and dtype not in _INTEGERS:
        rule = "torch cannot compute with this dtype"
    elif op == "avg" and not (dtype.is_floating_point or dtype.is_complex):
        rule = "an average needs a float or complex dtype"
    elif op in ("max", "min") and dtype.is_complex:
        rule = "complex numbers have no order"
    elif op in _BITWISE and (dtype.is_floating_point or dtype.is_complex):
        rule = "bitwise reductions need integers or booleans"
    if rule:
        raise ArgumentTypeError(f"cannot reduce {dtype} by {op!r}: {rule}")


def fold(pieces: Sequence[Tensor], op: str) -> Tensor:
    """Reduce tensors of one shape and dtype, in order, into a new tensor of that dtype.

    >>> fold([torch.tensor([1, 9]), torch.tensor([3, 4])], "max")
    tensor([3, 9])
    """
    dtype = pieces[0].dtype
    check(dtype, op)
    step = _BOOL_STEP[op] if dtype == torch.bool else _STEP[op]
    total = _widen(pieces[0], op)
    if total is pieces[0]:
        total = total.clone(memory_format=torch.contiguous_format)
    for piece in pieces[1:]:
        total = step(total, _widen(piece, op))
    if op == "avg":
        total /= len(pieces)
    return _narrow(total, dtype, op)


def _widen(piece: Tensor, op: str) -> Tensor:
    if piece.dtype == torch.uint64:
        signed = piece.view(torch.int64)
        return signed ^ _TOP_BIT if op in ("max", "min") else signed.clone()
    wider = _WIDER.get(piece.dtype)
    return piece if wider is None else piece.to(wider)


def _narrow(total: Tensor, dtype: torch.dtype, op: str) -> Tensor:
    if dtype == torch.uint64:
        return (total ^ _TOP_BIT if op in ("max", "min") else total).view(dtype)
    return total.to(dtype)
