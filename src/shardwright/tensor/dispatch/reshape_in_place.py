"""`t_`, `transpose_`, `unsqueeze_` and `squeeze_`, which change the dimensions and the layout of a tensor in place."""

from __future__ import annotations

from typing import Any

from shardwright.errors import InPlaceError
from shardwright.tensor.base.copied import is_copied
from shardwright.tensor.base.strides import copy_strides
from shardwright.tensor.base.tagging import DTensorBase, no_torch_function

__all__ = ["RESHAPES", "reshape_in_place"]

RESHAPES = frozenset({"t", "transpose", "unsqueeze", "squeeze"})


def reshape_in_place(name: str, func: Any, target: DTensorBase, args: Any, kwargs: dict[str, Any]) -> DTensorBase:
    """Change the dimensions of a tensor in place and return it.

    Raise InPlaceError if that needs communication, or the tensor is a leaf that requires grad.
    """
    reshaped: DTensorBase = getattr(target.detach(), name)(*args, **kwargs)
    if is_copied(reshaped):
        raise InPlaceError(f"{name}_ of {target._layout} would need communication: use the out-of-place {name}")
    if target.requires_grad and target.is_leaf and reshaped._layout is not target._layout:
        raise InPlaceError(
            f"{name}_ of {target._layout}, a leaf that requires grad: gradients of what was computed from it before "
            f"would not fit the new shards. Use the out-of-place {name}"
        )
    before = target._layout.shape
    with no_torch_function():
        if name == "squeeze":  # name the dimensions: one with size 1 only in this shard must stay
            target.squeeze_(_squeezed(before, *args, **kwargs))
        else:
            func(target, *args, **kwargs)
    target._layout = reshaped._layout
    copy_strides(target, reshaped)
    return target


def _squeezed(shape: tuple[int, ...], dim: Any = None) -> tuple[int, ...]:
    """Return the dimensions of size 1 that are dropped."""
    named = range(len(shape)) if dim is None else [dim] if isinstance(dim, int) else dim
    return tuple(sorted({d % len(shape) for d in named if shape and shape[d] == 1}))
