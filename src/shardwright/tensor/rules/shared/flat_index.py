"""Conversion between flat indices of a global tensor and of one region of it, as `take` and `argmax` use them."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from shardwright.layout import Region

__all__ = ["global_flat_index", "local_flat_index"]


def global_flat_index(index: Tensor, region: Region, shape: Sequence[int]) -> Tensor:
    """Convert flat indices of a region to flat indices of the global tensor of this shape."""
    result, step = torch.zeros_like(index), 1
    for dim in reversed(range(len(shape))):
        result = result + (index % region.size[dim] + region.offset[dim]) * step
        index = index // region.size[dim]
        step *= shape[dim]
    return result


def local_flat_index(index: Tensor, region: Region, shape: Sequence[int]) -> tuple[Tensor, Tensor]:
    """Return which global flat indices are in a region, and their flat indices there (0 for the others)."""
    inside, result, step = torch.ones_like(index, dtype=torch.bool), torch.zeros_like(index), 1
    for dim in reversed(range(len(shape))):
        local = index % shape[dim] - region.offset[dim]
        inside = inside & (local >= 0) & (local < region.size[dim])
        result = result + local * step
        index = index // shape[dim]
        step *= region.size[dim]
    return inside, torch.where(inside, result, 0)
