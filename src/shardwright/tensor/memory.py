"""Sizes and memory as wholes: a write that replaces a DTensor's local memory must leave what fits its layout."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from shardwright.errors import UnsupportedError
from shardwright.tensor.enter import forget_entered
from shardwright.tensor.local import DTensorBase, disabled

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
    """`resize_`: to the shape it has."""
    del options
    wanted = tuple(size[0]) if len(size) == 1 and not isinstance(size[0], int) else tuple(size)
    if wanted != target._layout.shape:
        raise UnsupportedError(
            f"resize_ of a DTensor {target._layout} to {wanted}: which rank would hold what is not known. Make a new "
            "tensor, with sw.empty or DTensor.new_empty"
        )
    return target


def resize_as_(target: DTensorBase, like: Tensor, **options: Any) -> DTensorBase:
    return resize_(target, like._layout.shape if isinstance(like, DTensorBase) else like.shape, **options)


def is_same_size(one: Tensor, other: Tensor) -> bool:
    """Of the global tensors: shards may be of one size where the tensors are not."""
    return torch.Size(one.shape) == torch.Size(other.shape)
