"""The shapes and dtypes of an operator's outputs, by a call on meta tensors of the global shapes.

Torch's own checks come with it, alike on all ranks.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from shardwright.tensor.dispatch.call import map_tensors
from shardwright.tensor.dispatch.recording import unrecorded
from shardwright.tensor.local import DTensorBase, no_torch_function
from shardwright.tensor.strides import global_stride

__all__ = ["Outputs", "outputs_of"]


class Outputs(NamedTuple):
    """The global shapes and the dtypes of a call's outputs."""

    shapes: tuple[tuple[int, ...], ...]
    dtypes: tuple[torch.dtype, ...]


def outputs_of(func: Any, args: Any, kwargs: dict[str, Any]) -> Outputs:
    """Return the outputs' global shapes and their dtypes: without autocast, which knows nothing of meta tensors."""
    meta_args, meta_kwargs = map_tensors(args, kwargs, _meta_of)  # type: ignore[arg-type]  # only DTensors are mapped
    meta_kwargs = {k: torch.device("meta") if k == "device" and v is not None else v for k, v in meta_kwargs.items()}
    with torch.no_grad(), unrecorded():
        result = func(*meta_args, **meta_kwargs)
    flat = result if isinstance(result, list | tuple) else [result]
    found = [value for value in flat if isinstance(value, torch.Tensor)]
    return Outputs(tuple(tuple(value.shape) for value in found), tuple(value.dtype for value in found))


def _meta_of(tensor: DTensorBase) -> torch.Tensor:
    """The global tensor's shape, strides and dtype, without its values."""
    with no_torch_function():
        dtype = tensor.dtype
    if dtype in _CAST and torch._C._is_any_autocast_enabled():
        dtype = torch.float32  # autocast makes dtypes alike, on real devices only; shapes do not depend on them
    return torch.empty_strided(tensor._layout.shape, global_stride(tensor), dtype=dtype, device="meta")


_CAST = frozenset((torch.float16, torch.bfloat16, torch.float32))
