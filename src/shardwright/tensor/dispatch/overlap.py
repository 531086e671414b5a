"""Refuse in-place operators that read a part of the memory they write, as in `x += x[0]`.

torch refuses most of them, too. With others, such as a column that is broadcast, it goes on with what has been written
so far: the result depends on the order of the writes, which is another one on shards.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

from shardwright.errors import InPlaceError
from shardwright.tensor.base.copied import is_copied
from shardwright.tensor.base.tagging import DTensorBase, no_torch_function
from shardwright.tensor.base.writes import storage_of

__all__ = ["refuse_overlap"]

_BY_VALUE = frozenset(("fill", "masked_fill"))  # torch reads the operand before the first write
_COPIES = frozenset(("copy", "__setitem__"))  # a copy that looks like a view is written to its base so


def refuse_overlap(name: str, tensors: Sequence[DTensorBase]) -> None:
    """Raise InPlaceError if the first tensor is written while a part of it is broadcast into the result."""
    target = tensors[0]
    for operand in tensors[1:]:
        if operand._layout.shape == target._layout.shape or name in _BY_VALUE or 0 in operand._layout.shape:
            continue
        with no_torch_function():
            read = [operand] if name in _COPIES else _bases(operand)
            overlaps = _is_whole(target) and any(storage_of(tensor) is storage_of(target) for tensor in read)
        if overlaps:
            raise InPlaceError(
                f"{name}_ writes to {target._layout} while it reads {operand._layout}, a part of the same memory: the "
                "result would depend on the order of the writes. clone() the part first"
            )


def _is_whole(tensor: DTensorBase) -> bool:
    """Return whether a tensor is not a view, or is a view of all elements of another."""
    base = tensor._base if tensor._is_view() else None
    return base is None or (isinstance(base, DTensorBase) and prod(base._layout.shape) == prod(tensor._layout.shape))


def _bases(tensor: DTensorBase) -> list[DTensorBase]:
    """Return a tensor and, if it looks like a view but is a copy, the tensors that it would be a view of."""
    chain = [tensor]
    while is_copied(tensor):
        tensor = tensor._base_version[0]
        chain.append(tensor)
    return chain
