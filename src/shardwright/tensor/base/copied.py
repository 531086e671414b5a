"""Copies that look like views: `x[i]` along a sharded dimension, `x.view(…)` that had to move its input.

torch's view would show later writes to its base, and writes to the view would reach the base. Such a copy records its
base and the version of the base's memory (`memory_version`) when it was made. Using a copy whose base was written to
since raises. The version is the same on every rank, so all ranks raise together.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from shardwright.errors import InPlaceError
from shardwright.tensor.base.tagging import DTensorBase
from shardwright.tensor.base.writes import memory_version, storage_of, was_written

__all__ = ["is_copied", "mark_copied", "memory_owner", "record_base_index", "refuse_copied", "refuse_stale"]


def is_copied(tensor: Tensor) -> bool:
    """Return whether a tensor looks like a view but is a copy, or shares the memory of such a copy."""
    return "_copied_by" in tensor.__dict__


def mark_copied(results: Any, operator: str, base: DTensorBase, sharing: Tensor | None = None) -> None:
    """Mark results that look like views of `base` as copies; given `sharing`, only those that share its memory."""
    if isinstance(results, DTensorBase):
        if results is not base and (sharing is None or storage_of(results) is storage_of(sharing)):
            results.__class__ = DTensorBase.copies
            results._copied_by = operator
            results._base_version = base, None if sharing is base else memory_version(base)
    elif isinstance(results, list | tuple):
        for result in results:
            mark_copied(result, operator, base, sharing)


def record_base_index(copied: Any, name: str, base: DTensorBase, args: Any, kwargs: dict[str, Any]) -> None:
    """Record the index of a copy in `base`, if one index describes it, so that writes to the copy can be passed on."""
    if name == "unbind" and isinstance(copied, tuple):
        dim = args[1] if len(args) > 1 else kwargs.get("dim", 0)
        for index, item in enumerate(copied):
            item._base_index = (base, _along(base, dim, index))
    elif name == "__getitem__" and len(args) == 2:
        copied._base_index = (base, args[1])
    elif name == "select" and len(args) == 3:
        copied._base_index = (base, _along(base, args[1], args[2]))


def _along(base: DTensorBase, dim: int, index: int) -> tuple[Any, ...]:
    return (*[slice(None)] * (dim % len(base._layout.shape)), index)


def memory_owner(tensor: DTensorBase) -> DTensorBase:
    """Return the copy whose memory a tensor shares: itself, unless it is a view of a copy."""
    while tensor._base_version[1] is None:
        tensor = tensor._base_version[0]
    return tensor


def refuse_stale(name: str, tensor: Any) -> None:
    """Raise InPlaceError if the base of a copy was written to since the copy was made."""
    link = tensor
    while is_copied(link):
        base, before = link._base_version
        if before is not None and was_written(base, before):
            raise InPlaceError(
                f"{name}: this tensor, {tensor._layout}, looks like a view but is a copy, because {_spoken(link)} of a "
                "sharded dimension needed communication; the base was written to since, which a view would show "
                f"and a copy does not: take {_spoken(link)} again after the write, or clone() it before, if the old "
                "values are meant"
            )
        link = base


def _spoken(copy: DTensorBase) -> str:
    return {"__getitem__": "x[...]"}.get(copy._copied_by, copy._copied_by)


def refuse_copied(name: str, target: DTensorBase) -> None:
    """Raise InPlaceError for a write to what looks like a view but is a copy: the write would be lost."""
    if is_copied(target):
        raise InPlaceError(
            f"{name}: this tensor looks like a view but is a copy, because {_spoken(target)} of a sharded dimension "
            "needed communication: write to the base tensor (x[i] = …, or through x[i:i+1], which is a view), or "
            "take the view along a dimension that is not sharded"
        )
