"""What changes nothing in a reduction: zero for a sum, one for a product, the least number for a maximum."""

from __future__ import annotations

from functools import lru_cache

import torch

from shardwright.errors import ArgumentTypeError

__all__ = ["IDEMPOTENT", "identity_element"]

# The reduction of equal values is that value, so replicas are addends as they are.
IDEMPOTENT = frozenset(("avg", "max", "min", "band", "bor"))


@lru_cache(maxsize=256)
def identity_element(dtype: torch.dtype, op: str) -> bool | int | float:
    """The number that padding is made of.

    >>> identity_element(torch.float32, "max"), identity_element(torch.int8, "max"), identity_element(torch.bool, "min")
    (-inf, -128, True)
    >>> identity_element(torch.complex64, "max")
    Traceback (most recent call last):
    shardwright.errors.ArgumentTypeError: torch.complex64 has no neutral element for 'max': ...
    """
    if op in ("sum", "avg", "bor", "bxor"):
        number: bool | int | float = 0
    elif op == "product":
        number = 1
    elif op == "band":
        number = True if dtype == torch.bool else (1 << 8 * dtype.itemsize) - 1 if not dtype.is_signed else -1
    else:
        number = _extreme(dtype, op)
    if dtype == torch.bool:
        return bool(number)
    if dtype.is_floating_point and float(torch.tensor(float(number)).to(dtype).float()) != number:
        raise _none(dtype, op)
    return number


def _extreme(dtype: torch.dtype, op: str) -> bool | int | float:
    """The least number for a maximum, the greatest for a minimum."""
    if dtype.is_complex:
        raise _none(dtype, op)
    if dtype == torch.bool:
        return op == "min"
    if not dtype.is_floating_point:
        return int(torch.iinfo(dtype).min if op == "max" else torch.iinfo(dtype).max)
    infinity = float("-inf" if op == "max" else "inf")
    if float(torch.tensor(infinity).to(dtype).float()) == infinity:
        return infinity
    return float(torch.finfo(dtype).min if op == "max" else torch.finfo(dtype).max)


def _none(dtype: torch.dtype, op: str) -> ArgumentTypeError:
    return ArgumentTypeError(
        f"{dtype} has no neutral element for {op!r}: values of it cannot be made addends; convert it to another dtype"
    )
