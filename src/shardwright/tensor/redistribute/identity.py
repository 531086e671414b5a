"""The identity element of each reduction: 0 for a sum, 1 for a product, the least value for a maximum."""

from __future__ import annotations

from functools import lru_cache

import torch

from shardwright.errors import ArgumentTypeError

__all__ = ["IDEMPOTENT", "identity_element"]

# Reducing equal values gives that value, so replicas serve as partial values unchanged.
IDEMPOTENT = frozenset(("avg", "max", "min", "band", "bor"))


@lru_cache(maxsize=256)
def identity_element(dtype: torch.dtype, op: str) -> bool | int | float:
    """Return the value used as padding.

    >>> identity_element(torch.float32, "max"), identity_element(torch.int8, "max"), identity_element(torch.bool, "min")
    (-inf, -128, True)
    >>> identity_element(torch.complex64, "max")
    Traceback (most recent call last):
    shardwright.errors.ArgumentTypeError: torch.complex64 has no identity element for 'max', so ...
    """
    if op in ("sum", "avg", "bor", "bxor"):
        value: bool | int | float = 0
    elif op == "product":
        value = 1
    elif op == "band":
        value = True if dtype == torch.bool else (1 << 8 * dtype.itemsize) - 1 if not dtype.is_signed else -1
    else:
        value = _extreme(dtype, op)
    if dtype == torch.bool:
        return bool(value)
    if dtype.is_floating_point and float(torch.tensor(float(value)).to(dtype).float()) != value:
        raise _no_identity(dtype, op)
    return value


def _extreme(dtype: torch.dtype, op: str) -> bool | int | float:
    """Return the least value for a maximum, the greatest for a minimum."""
    if dtype.is_complex:
        raise _no_identity(dtype, op)
    if dtype == torch.bool:
        return op == "min"
    if not dtype.is_floating_point:
        return int(torch.iinfo(dtype).min if op == "max" else torch.iinfo(dtype).max)
    infinity = float("-inf" if op == "max" else "inf")
    if float(torch.tensor(infinity).to(dtype).float()) == infinity:
        return infinity
    return float(torch.finfo(dtype).min if op == "max" else torch.finfo(dtype).max)


def _no_identity(dtype: torch.dtype, op: str) -> ArgumentTypeError:
    return ArgumentTypeError(
        f"{dtype} has no identity element for {op!r}, so it cannot become Partial({op!r}): convert it to another dtype"
    )
