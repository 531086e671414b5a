"""The strides a global tensor would have: in the order of the local ones, over global sizes."""

from __future__ import annotations

from shardwright.tensor.local import DTensorBase, no_torch_function

__all__ = ["global_stride"]


def global_stride(tensor: DTensorBase) -> tuple[int, ...]:
    """The strides of the global tensor, were it laid out densely in the order of dimensions that the shard has."""
    shape = tensor._layout.shape
    with no_torch_function():
        local = tensor.stride()
        sizes = tensor.shape
    order = sorted(range(len(shape)), key=lambda dim: (local[dim] if sizes[dim] > 1 else -1, -dim))
    # A dimension of size 1 has a meaningless stride: it goes where a contiguous tensor would have it.
    if all(local[d] >= local[d + 1] for d in range(len(shape) - 1)):
        order = list(reversed(range(len(shape))))
    strides = [0] * len(shape)
    step = 1
    for dim in order:
        if local[dim] == 0 and sizes[dim] > 1:
            continue  # expanded: it stays 0
        strides[dim] = step
        step *= max(shape[dim], 1)
    return tuple(strides)
