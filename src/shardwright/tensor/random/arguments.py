"""Validate the arguments of distributions: bounds, probabilities and dtypes."""

from __future__ import annotations

import torch

from shardwright.errors import ArgumentTypeError, RandomArgumentError

__all__ = ["check_bounds", "check_dtype", "check_integers", "check_that", "largest_below"]

_SAME_SIZE = {2: torch.int16, 4: torch.int32, 8: torch.int64}


def check_that(holds: bool, distribution: str, name: str, value: object, rule: str) -> None:
    """Raise unless the condition holds.

    >>> check_that(False, "normal", "std", -1.0, "at least 0")
    Traceback (most recent call last):
    shardwright.errors.RandomArgumentError: normal: std must be at least 0, got -1.0
    """
    if not holds:
        raise RandomArgumentError(f"{distribution}: {name} must be {rule}, got {value}")


def check_dtype(distribution: str, dtype: torch.dtype, *, complex_too: bool = False) -> None:
    """Raise unless the dtype is float16, bfloat16, float32 or float64, or, with `complex_too`, complex64 or complex128.

    >>> check_dtype("cauchy", torch.int32)
    Traceback (most recent call last):
    shardwright.errors.ArgumentTypeError: cauchy: the dtype must be floating, got torch.int32
    """
    floats = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
    if dtype in floats or (complex_too and dtype in (torch.complex64, torch.complex128)):
        return
    kinds = "floating or complex" if complex_too else "floating"
    raise ArgumentTypeError(f"{distribution}: the dtype must be {kinds}, got {dtype}")


def check_bounds(low: float, high: float, dtype: torch.dtype) -> None:
    """Raise if an interval is reversed, or exceeds the range of the dtype.

    >>> check_bounds(2.0, 1.0, torch.float32)
    Traceback (most recent call last):
    shardwright.errors.RandomArgumentError: uniform: [low, high) = [2.0, 1.0) is reversed: ...
    """
    largest = torch.finfo(dtype).max
    if low > high:
        raise RandomArgumentError(f"uniform: [low, high) = [{low}, {high}) is reversed: low must be at most high")
    if not (-largest <= low and high <= largest and high - low <= largest):
        raise RandomArgumentError(
            f"uniform: [low, high) = [{low}, {high}) exceeds the range of {dtype}: "
            f"low, high and high - low must be at most {largest:.6g} in magnitude"
        )


def check_integers(low: int, high: int, dtype: torch.dtype) -> None:
    """Raise if a range is empty, or contains integers that the dtype cannot represent.

    >>> check_integers(0, 300, torch.uint8)
    Traceback (most recent call last):
    shardwright.errors.RandomArgumentError: integers: [0, 300) is not in [0, 256), ...
    """
    if low >= high:
        raise RandomArgumentError(f"integers: [{low}, {high}) is empty: low must be less than high")
    if dtype.is_complex:
        raise ArgumentTypeError(f"integers: the dtype must be integer, bool or floating, got {dtype}")
    if dtype is torch.bool:
        first, last = 0, 1
    elif dtype.is_floating_point:
        check_dtype("integers", dtype)
        last = round(2 / torch.finfo(dtype).eps)
        first = -last
    else:
        first, last = torch.iinfo(dtype).min, torch.iinfo(dtype).max
    if low < first or high - 1 > last:
        raise RandomArgumentError(
            f"integers: [{low}, {high}) is not in [{first}, {last + 1}), the integers that {dtype} represents exactly: "
            "use a smaller range or a larger dtype"
        )


def largest_below(bound: float, dtype: torch.dtype) -> float:
    """Return the largest number of the dtype that is less than the bound.

    >>> largest_below(1.0, torch.bfloat16), largest_below(1.001, torch.bfloat16)
    (0.99609375, 1.0)
    """
    nearest = torch.tensor(bound, dtype=dtype)
    if nearest.item() < bound:
        return float(nearest)
    bits = nearest.view(_SAME_SIZE[dtype.itemsize])
    if nearest.item() == 0:
        return -torch.finfo(dtype).smallest_normal * torch.finfo(dtype).eps
    return float((bits - 1 if nearest.item() > 0 else bits + 1).view(dtype))
