"""Refuse in-place operators that read a part of the memory they write, as in `x += x[0]`.

torch refuses most of them, too. With others, such as a column that is broadcast, it goes on with what has been written
so far: the result depends on the order of the writes, which is another one on shards.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import Any

from torch import Tensor

from shardwright.errors import InPlaceError
from shardwright.tensor.base.copied import is_copied
from shardwright.tensor.base.tagging import DTensorBase, no_torch_function
from shardwright.tensor.base.writes import storage_of

__all__ = ["refuse_overlap"]

_BY_VALUE = frozenset(("fill", "masked_fill"))  # torch reads the operand before the first write
_BY_INDEX = frozenset(  # these write elements to other places than they are read from
    ("index_put", "index_copy", "index_add", "index_reduce", "scatter", "scatter_add", "scatter_reduce", "put")
)
_COPIES = frozenset(("copy", "__setitem__"))  # a copy that looks like a view is written to its base so


def refuse_overlap(name: str, tensors: Sequence[DTensorBase], args: Sequence[Any]) -> None:
    """Raise InPlaceError if the first tensor is written while other elements of it are read into the result."""
    target = tensors[0]
    same_elements = name not in _BY_INDEX and not (name == "__setitem__" and _has_index_list(args[1]))
    for operand in tensors[1:]:
        if same_elements and operand._layout.shape == target._layout.shape:
            continue
        if name in _BY_VALUE or 0 in operand._layout.shape:
            continue
        with no_torch_function():
            read = [operand] if name in _COPIES else _bases(operand)
            overlaps = _is_whole(target) and any(storage_of(tensor) is storage_of(target) for tensor in read)
        if overlaps:
            raise InPlaceError(
                f"{name}_ writes to {target._layout} while it reads {operand._layout}, a part of the same memory: the "
                "result would depend on the order of the writes. clone() the part first"
            )


def _has_index_list(index: Any) -> bool:
    """Return whether an index has lists or tensors of positions, beside slices and numbers."""
    return any(isinstance(each, list | Tensor) for each in (index if isinstance(index, tuple) else (index,)))


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
