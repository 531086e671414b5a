"""The shapes and dtypes of an operator's outputs, by a call on meta tensors of the global shapes.

The call also runs torch's argument checks, with the same outcome on all ranks.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from shardwright.tensor.base.capture import not_captured
from shardwright.tensor.base.strides import meta_of
from shardwright.tensor.dispatch.arguments import map_tensors

__all__ = ["Outputs", "call_on_meta", "outputs_of"]


class Outputs(NamedTuple):
    """The global shapes and the dtypes of a call's outputs."""

    shapes: tuple[tuple[int, ...], ...]
    dtypes: tuple[torch.dtype, ...]


def outputs_of(
    func: Any, args: Any, kwargs: dict[str, Any], casts: Sequence[torch.dtype | None] | None = None
) -> Outputs:
    """Return the outputs' global shapes and dtypes, without autocast, which does not cast meta tensors.

    `casts` are the dtypes that the DTensors are cast to for the call (None: left as they are).
    """
    wanted = iter(casts or ())

    def meta(tensor: Any) -> torch.Tensor:
        dtype = next(wanted, None)
        made = meta_of(tensor)
        return made if dtype is None else made.to(dtype)

    results = call_on_meta(func, *map_tensors(args, kwargs, meta))
    return Outputs(tuple(tuple(value.shape) for value in results), tuple(value.dtype for value in results))


def call_on_meta(func: Any, args: Any, kwargs: dict[str, Any]) -> list[torch.Tensor]:
    """Return the tensors that a call on meta tensors returns."""
    kwargs = {k: torch.device("meta") if k == "device" and v is not None else v for k, v in kwargs.items()}
    with torch.no_grad(), not_captured():
        result = func(*args, **kwargs)
    flat = result if isinstance(result, list | tuple) else [result]
    return [value for value in flat if isinstance(value, torch.Tensor)]
