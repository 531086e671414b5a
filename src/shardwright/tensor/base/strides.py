"""The strides of a global tensor on one device: they decide whether torch copies or returns an alias.

They follow from the shard's strides, unless the shard is ambiguous: a shard of a transposed tensor with one column
looks contiguous, and so does the part that a slice of a sharded dimension leaves on a rank. The strides of such a
tensor are recorded. So every rank computes the same strides, and takes the same decision.
"""

from __future__ import annotations

from itertools import pairwise

import torch
from torch import Tensor

from shardwright.layout import Layout
from shardwright.tensor.base.tagging import DTensorBase, disabled, no_torch_function

__all__ = ["copy_strides", "global_stride", "has_thin_shards", "is_contiguous", "meta_of", "record_strides"]

_is_contiguous = Tensor.is_contiguous
_CAST = frozenset((torch.float16, torch.bfloat16, torch.float32))


def meta_of(tensor: DTensorBase) -> Tensor:
    """Return a meta tensor with the global tensor's shape, strides and dtype."""
    with no_torch_function():
        dtype = tensor.dtype
    if dtype in _CAST and torch._C._is_any_autocast_enabled():
        dtype = torch.float32  # autocast does not cast meta tensors: avoid mixed dtypes
    return torch.empty_strided(tensor._layout.shape, global_stride(tensor), dtype=dtype, device="meta")


def is_contiguous(tensor: DTensorBase) -> bool:
    """Return whether the global tensor would be contiguous on one device. Deterministic across ranks."""
    # Strides are recorded only if they are not those of a contiguous tensor.
    return "_strides" not in tensor.__dict__ and bool(disabled(_is_contiguous, (), (tensor,), {}))


def record_strides(tensor: DTensorBase, strides: tuple[int, ...], always: bool = False) -> None:
    """Record the strides of a new non-contiguous tensor if some rank's shard does not determine them."""
    if always or _hides(tensor._layout, strides):
        tensor._strides = strides
        if type(tensor) in (DTensorBase.concrete, DTensorBase.parameter_values):
            tensor.__class__ = DTensorBase.strided


def copy_strides(target: DTensorBase, source: DTensorBase) -> None:
    """Copy the recorded strides of `source` to `target`, which now shares its memory."""
    target.__dict__.pop("_strides", None)
    if type(target) is DTensorBase.strided:
        target.__class__ = DTensorBase.parameter_values if "_use" in target.__dict__ else DTensorBase.concrete
    if "_strides" in source.__dict__:
        record_strides(target, source._strides, always=True)


def global_stride(tensor: DTensorBase) -> tuple[int, ...]:
    """Return the strides of the global tensor: as recorded, or those of the shard, scaled to global sizes."""
    known: tuple[int, ...] | None = tensor.__dict__.get("_strides")
    if known is not None:
        return known
    shape = tensor._layout.shape
    with no_torch_function():
        local, sizes = tensor.stride(), tensor.shape
        if tensor.is_contiguous():
            return torch.empty(shape, device="meta").stride()
    strides = [0] * len(shape)
    # From the innermost dimension outwards. Of two equal strides, that of a dimension of size 1 is the inner one.
    before: int | None = None
    for dim in sorted(range(len(shape)), key=lambda dim: (local[dim], sizes[dim] > 1, -dim)):
        if local[dim] == 0:
            continue  # expanded
        if before is None:
            strides[dim] = local[dim]
        else:  # the same gap as in the shard
            strides[dim] = strides[before] * shape[before] * local[dim] // (local[before] * max(sizes[before], 1))
        strides[dim] = max(strides[dim], 1)
        before = dim
    return tuple(strides)


def has_thin_shards(layout: Layout) -> bool:
    """Return whether some rank has fewer than two elements of a longer dimension, so that its strides are ambiguous."""
    return any(least < min(size, 2) for least, size in zip(_least_sizes(layout), layout.shape, strict=True))


def _least_sizes(layout: Layout) -> tuple[int, ...]:
    return tuple(layout.table().sizes.min(axis=0).tolist())


def _hides(layout: Layout, strides: tuple[int, ...]) -> bool:
    """Return whether some rank's shard may look contiguous although the global tensor has these strides."""
    least = _least_sizes(layout)
    if 0 in least and 0 not in layout.shape:
        return True
    sharded = {dim for dim, size in enumerate(layout.shape) if least[dim] < size or len(layout.cut_by(dim)) > 0}
    left = [dim for dim in range(layout.ndim) if least[dim] > 1]  # of the smallest shard
    if not left:
        return True
    inner = left[-1]
    if strides[inner] != 1 and not any(strides[d] < strides[inner] for d in sharded):
        return False  # strided, or another dimension is innermost: visible in every shard
    for outer, inner in pairwise(left):
        if strides[outer] < strides[inner] or strides[outer] == 0:
            return False  # permuted: visible in every shard
        between = any(strides[inner] <= strides[d] < strides[outer] for d in sharded if d != outer)
        if not between and strides[outer] != strides[inner] * layout.shape[inner]:
            return False  # a gap after an unsharded dimension: visible in every shard
    return True
