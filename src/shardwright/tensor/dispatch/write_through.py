"""Writes to what was picked of a sharded dimension, of which every rank has an addend: `x[i] += 1`.

The sum is completed, written to, and kept as addends again. `x[i]` looks like a view but is a copy: what is written to
it goes on to the original.
"""

from __future__ import annotations

from typing import Any

from shardwright.tensor.local import DTensorBase, no_torch_function, tag, version_of
from shardwright.tensor.moving.movement import move
from shardwright.tensor.types import REPLICATE

__all__ = ["has_origin", "remember_origin", "write_through"]


def remember_origin(picked: Any, name: str, base: DTensorBase, args: Any) -> None:
    """Notes what was picked of which tensor, where one index says it."""
    if name == "unbind" and isinstance(picked, tuple):
        for place, one in enumerate(picked):
            one._origin = (base, _along(base, args[1] if len(args) > 1 else 0, place))
    if not isinstance(picked, DTensorBase):
        return
    if name == "__getitem__" and len(args) == 2:
        picked._origin = (base, args[1])
    elif name == "select" and len(args) == 3:
        picked._origin = (base, _along(base, args[1], args[2]))


def _along(base: DTensorBase, dim: int, place: int) -> tuple[Any, ...]:
    return (*[slice(None)] * (dim % len(base._layout.shape)), place)


def has_origin(tensor: Any) -> bool:
    """Whether this tensor was picked of another, so that `write_through` knows what a write to it means."""
    return isinstance(tensor, DTensorBase) and "_origin" in tensor.__dict__


def write_through(func: Any, target: DTensorBase, *args: Any, **kwargs: Any) -> DTensorBase:
    """The picked tensor, written to; so is what it was picked of. Every rank takes part.

    It is picked again first: a view would have seen what was written to the original meanwhile.
    """
    layout = target._layout
    current: Any = target if target._origin is None else target._origin[0][target._origin[1]]
    placements = [REPLICATE if placement.is_partial() else placement for placement in layout.placements]
    whole = layout.replace(placements=placements, order=layout.order)
    with no_torch_function():
        moved = move(current, current._layout, whole)
        fresh = tag(moved.clone() if moved is current else moved, whole)
    func(fresh, *args, **kwargs)
    if target._origin is not None:
        base, index = target._origin
        base[index] = fresh
    with no_torch_function():
        target.copy_(move(fresh, whole, layout))
    if "_seen" in target.__dict__ and target._seen[1] is not None:
        target._seen = target._seen[0], version_of(target._seen[0])  # it has what was written
    return target
