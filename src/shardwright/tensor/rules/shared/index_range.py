"""Range checks for global indices, before ranks that hold only a shard look them up."""

from __future__ import annotations

import torch
from torch import Tensor

from shardwright.tensor.base.capture import capture_call

__all__ = ["check_range"]


def check_range(
    name: str, indices: Tensor, count: int, ignored: int | None = None, *, allow_negative: bool = False
) -> None:
    """Raise IndexError for indices out of range, as torch does; on other devices than the CPU, assert asynchronously.

    `allow_negative`: accept negative indices, which count from the end.
    """
    capture_call(_check_range, name, indices, -count if allow_negative else 0, count, ignored)


def _check_range(name: str, indices: Tensor, first: int, count: int, ignored: int | None) -> None:
    fits = (indices >= first) & (indices < count)
    fits = fits if ignored is None else fits | (indices == ignored)
    if indices.device.type != "cpu":
        torch._assert_async(fits.all())
    elif not fits.all():
        index = indices[~fits].flatten()[0].item()
        raise IndexError(f"{name}: index {index} is out of range for {count} elements: {first} to {count - 1}")
