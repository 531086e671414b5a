"""Sizes and memory as wholes: a write that replaces a DTensor's local memory must leave what fits its layout."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from shardwright.errors import InPlaceError, UnsupportedError
from shardwright.layout import Placement, Ragged, Shard
from shardwright.tensor.gradients.enter import forget_entered
from shardwright.tensor.local import DTensorBase, disabled
from shardwright.tensor.types import REPLICATE

__all__ = ["is_same_size", "resize_", "resize_as_", "set_"]


def set_(target: DTensorBase, source: Any = None, *where: Any, **named: Any) -> DTensorBase:
    """`set_`: the target becomes the source, memory and layout."""
    if not isinstance(source, DTensorBase) or where or named:
        raise UnsupportedError(
            f"set_ of a DTensor {target._layout} takes a DTensor and nothing else: memory without a layout would be "
            "taken for a shard. Use DTensor.from_local for a local tensor"
        )
    disabled(Tensor.set_, (), (target, source), {})
    target._layout = source._layout
    forget_entered()
    return target


def resize_(target: DTensorBase, *size: Any, **options: Any) -> DTensorBase:
    """`resize_`: the same elements in another shape, as many as there is room for; new ones are arbitrary.

    It stays cut along the dimensions that there still are.
    """
    del options
    wanted = tuple(size[0]) if len(size) == 1 and not isinstance(size[0], int) else tuple(size)
    if wanted == target._layout.shape:
        return target
    if target.requires_grad:
        raise InPlaceError(f"resize_ of a DTensor {target._layout}: its gradient is asked for, as of this shape")
    flat: Any = target.flatten()
    count = torch.Size(wanted).numel()
    if count > flat.numel():
        flat = torch.cat([flat, flat.new_zeros(count - flat.numel())])
    resized = flat[:count].reshape(wanted).redistribute(placements=_kept(target._layout.placements, wanted))
    return set_(target, resized.clone())


def _kept(placements: Sequence[Placement], shape: tuple[int, ...]) -> list[Placement]:
    """Placements for another shape: even where they were uneven, whole where the dimension is gone."""
    kept: list[Placement] = []
    for placement in placements:
        if isinstance(placement, Shard | Ragged):
            kept.append(Shard(placement.dim) if placement.dim < len(shape) else REPLICATE)
        else:
            kept.append(placement)
    return kept


def resize_as_(target: DTensorBase, like: Tensor, **options: Any) -> DTensorBase:
    return resize_(target, like._layout.shape if isinstance(like, DTensorBase) else like.shape, **options)


def is_same_size(one: Tensor, other: Tensor) -> bool:
    """Of the global tensors: shards may be of one size where the tensors are not."""
    return torch.Size(one.shape) == torch.Size(other.shape)
