"""`t_`, `transpose_` and `unsqueeze_`: the tensor itself gets other dimensions, and a layout that says so."""

from __future__ import annotations

from typing import Any

from shardwright.errors import InPlaceError
from shardwright.tensor.local import DTensorBase, no_torch_function

__all__ = ["RESHAPES", "reshape_in_place"]

RESHAPES = frozenset({"t", "transpose", "unsqueeze"})


def reshape_in_place(name: str, func: Any, target: DTensorBase, args: Any, kwargs: dict[str, Any]) -> DTensorBase:
    """The tensor, with its dimensions changed; refused where that would need communication."""
    shown: DTensorBase = getattr(target.detach(), name)(*args, **kwargs)
    if "_copied" in shown.__dict__:
        raise InPlaceError(f"{name}_ of {target._layout} would need communication: use the out-of-place {name}")
    with no_torch_function():
        func(target, *args, **kwargs)
    target._layout = shown._layout
    return target
