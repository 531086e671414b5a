"""Indices of a global tensor, checked before ranks that hold a part of it look them up."""

from __future__ import annotations

import torch
from torch import Tensor

from shardwright.tensor.base.capture import capture_call

__all__ = ["check_range"]


def check_range(
    name: str, indices: Tensor, count: int, ignored: int | None = None, *, from_the_end: bool = False
) -> None:
    """Refuses indices that no rank holds, as torch does; on other devices than the CPU, torch's way: by assertion.

    `from_the_end`: negative ones count from there.
    """
    capture_call(_check_range, name, indices, -count if from_the_end else 0, count, ignored)


def _check_range(name: str, indices: Tensor, first: int, count: int, ignored: int | None) -> None:
    fits = (indices >= first) & (indices < count)
    fits = fits if ignored is None else fits | (indices == ignored)
    if indices.device.type != "cpu":
        torch._assert_async(fits.all())
    elif not fits.all():
        wrong = indices[~fits].flatten()[0].item()
        raise IndexError(f"{name}: index {wrong} is out of range for {count} elements: {first} to {count - 1}")
