"""Refuse a backward pass that would need values which were overwritten through an alias, such as `x.data`.

Autograd does not count such a write: torch's backward computes with the new values. An operator whose input was
redistributed has saved a copy, which has the old ones. Only memory that has several version counters can be written to
in this way, see `base/writes.py`.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from torch import Tensor

from shardwright.errors import InPlaceError
from shardwright.layout import Layout
from shardwright.tensor.base.gradient_types import without_entered
from shardwright.tensor.base.tagging import DTensorBase, no_torch_function
from shardwright.tensor.base.writes import MemoryVersion, has_aliases, memory_version
from shardwright.tensor.redistribute.autograd import needs_redistribution

__all__ = ["aliased_inputs", "refuse_aliased_write", "refuse_later_writes"]


def aliased_inputs(
    tensors: Sequence[DTensorBase], moves: Sequence[tuple[Layout, Layout] | None]
) -> list[tuple[DTensorBase, MemoryVersion]]:
    """Return the inputs that were copied by a redistribution and have aliases, with the versions of their memory."""
    return [
        (tensor, memory_version(tensor))
        for tensor, layouts in zip(tensors, moves, strict=True)
        if layouts is not None and has_aliases(tensor) and needs_redistribution(layouts[0], without_entered(layouts[1]))
    ]


def refuse_later_writes(results: Iterable[Tensor], inputs: list[tuple[DTensorBase, MemoryVersion]]) -> None:
    """Make the backward of an operator raise InPlaceError if one of its inputs was written to through an alias."""

    def check(_: Any) -> None:
        for tensor, before in inputs:
            refuse_aliased_write(tensor, before)

    with no_torch_function():
        for result in results:
            if result.grad_fn is not None:
                result.grad_fn.register_prehook(check)


def refuse_aliased_write(tensor: DTensorBase, before: MemoryVersion) -> None:
    """Raise InPlaceError if the memory of a tensor was written to through an alias since `before`."""
    now = memory_version(tensor)
    # The first count is autograd's own: torch itself checks it where a saved tensor is used.
    if now.storage is before.storage and now.counts[1:] != before.counts[1:]:
        raise InPlaceError(
            f"a tensor {tensor._layout} was written to through .data, or another alias that autograd does not know, "
            "after an operator had used it, and before backward: torch would compute gradients with the new values, "
            "but its redistributed copy has the old ones. Write after backward, or under torch.no_grad() without .data"
        )
