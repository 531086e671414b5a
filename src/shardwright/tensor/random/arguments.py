"""What distributions accept: bounds, probabilities and types, refused with the number and the rule."""

from __future__ import annotations

import torch

from shardwright.errors import ArgumentTypeError, RandomArgumentError

__all__ = ["check_bounds", "check_dtype", "check_integers", "check_that", "largest_below"]

_SAME_SIZE = {2: torch.int16, 4: torch.int32, 8: torch.int64}


def check_that(holds: bool, distribution: str, name: str, value: object, rule: str) -> None:
    """Refuse the value where the rule does not hold.

    >>> check_that(True, "normal", "std", 1.0, "is negative")
    """
    if not holds:
        raise RandomArgumentError(f"{distribution}: {name} = {value} {rule}")


def check_dtype(distribution: str, dtype: torch.dtype, *, complex_too: bool = False) -> None:
    """Refuse what is not float16, bfloat16, float32 or float64 (nor complex64 or complex128, where these count).

    >>> check_dtype("cauchy", torch.int32)
    Traceback (most recent call last):
    shardwright.errors.ArgumentTypeError: cauchy: torch.int32 cannot hold its numbers: fill a float tensor
    """
    floats = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
    if dtype in floats or (complex_too and dtype in (torch.complex64, torch.complex128)):
        return
    kinds = "a float or complex tensor" if complex_too else "a float tensor"
    raise ArgumentTypeError(f"{distribution}: {dtype} cannot hold its numbers: fill {kinds}")


def check_bounds(low: float, high: float, dtype: torch.dtype) -> None:
    """Refuse an interval that is reversed, or that goes beyond the type.

    >>> check_bounds(2.0, 1.0, torch.float32)
    Traceback (most recent call last):
    shardwright.errors.RandomArgumentError: uniform: [low, high) = [2.0, 1.0) is reversed: ...
    """
    largest = torch.finfo(dtype).max
    if low > high:
        raise RandomArgumentError(f"uniform: [low, high) = [{low}, {high}) is reversed: low is at most high")
    if not (-largest <= low and high <= largest and high - low <= largest):
        raise RandomArgumentError(
            f"uniform: [low, high) = [{low}, {high}) goes beyond {dtype}: "
            f"low, high and high - low are at most {largest:.6g} in size"
        )


def check_integers(low: int, high: int, dtype: torch.dtype) -> None:
    """Refuse an empty range, or one that holds integers the type does not have.

    >>> check_integers(0, 300, torch.uint8)
    Traceback (most recent call last):
    shardwright.errors.RandomArgumentError: integers: [0, 300) is not in [0, 256), ...
    """
    if low >= high:
        raise RandomArgumentError(f"integers: [{low}, {high}) is empty: low is less than high")
    if dtype.is_complex:
        raise ArgumentTypeError(f"integers: {dtype} cannot hold its numbers: fill an integer, bool or float tensor")
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
            f"integers: [{low}, {high}) is not in [{first}, {last + 1}), the integers that {dtype} holds exactly: "
            "take a smaller range or a larger type"
        )


def largest_below(bound: float, dtype: torch.dtype) -> float:
    """The largest number of the type that is less than the bound.

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
