"""The strides a global tensor would have: in the order of the local ones, over global sizes."""

from __future__ import annotations

from shardwright.tensor.local import DTensorBase, no_torch_function

__all__ = ["global_stride", "is_contiguous", "row_major"]


def row_major(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Return the strides of a contiguous tensor."""
    strides, step = [], 1
    for size in reversed(shape):
        strides.append(step)
        step *= max(size, 1)
    return tuple(reversed(strides))


def is_contiguous(tensor: DTensorBase) -> bool:
    """Return whether the global tensor would be contiguous on one device: the same answer on every rank."""
    known = tensor.__dict__.get("_strides")
    if known is not None:
        return False  # strides are noted where they are not those of a contiguous tensor
    with no_torch_function():
        return tensor.is_contiguous()


def global_stride(tensor: DTensorBase) -> tuple[int, ...]:
    """Return the strides of the global tensor: as noted, or dense in the order of dimensions that the shard has."""
    known: tuple[int, ...] | None = tensor.__dict__.get("_strides")
    if known is not None:
        return known
    shape = tensor._layout.shape
    with no_torch_function():
        local = tensor.stride()
        sizes = tensor.shape
        if tensor.is_contiguous():
            return row_major(shape)
    order = sorted(range(len(shape)), key=lambda dim: (local[dim] if sizes[dim] > 1 else -1, -dim))
    # A dimension of size 1 has a meaningless stride: it goes where a contiguous tensor would have it.
    strides = [0] * len(shape)
    step = 1
    for dim in order:
        if local[dim] == 0 and sizes[dim] > 1:
            continue  # expanded: it stays 0
        strides[dim] = step
        step *= max(shape[dim], 1)
    return tuple(strides)
