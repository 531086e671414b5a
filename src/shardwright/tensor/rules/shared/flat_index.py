"""Elements numbered through all dimensions of a tensor, as `take` and `argmax` do: in the whole, and in one region."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from shardwright.layout import Region

__all__ = ["place_in_region", "place_in_whole"]


def place_in_whole(place: Tensor, region: Region, shape: Sequence[int]) -> Tensor:
    """Numbers of elements of a region as numbers in the whole tensor of this shape."""
    found, step = torch.zeros_like(place), 1
    for dim in reversed(range(len(shape))):
        found = found + (place % region.size[dim] + region.offset[dim]) * step
        place = place // region.size[dim]
        step *= shape[dim]
    return found


def place_in_region(place: Tensor, region: Region, shape: Sequence[int]) -> tuple[Tensor, Tensor]:
    """Which numbers in the whole tensor lie in a region, and their numbers there (0 for the others)."""
    inside, found, step = torch.ones_like(place, dtype=torch.bool), torch.zeros_like(place), 1
    for dim in reversed(range(len(shape))):
        at = place % shape[dim] - region.offset[dim]
        inside = inside & (at >= 0) & (at < region.size[dim])
        found = found + at * step
        place = place // shape[dim]
        step *= region.size[dim]
    return inside, torch.where(inside, found, 0)
