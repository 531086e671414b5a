"""Parameters that are gathered together: how an operator asks the unit of a parameter for its gathered value.

A parameter that belongs to a unit has it, and its index there, in its attribute `_unit`. The units themselves are in a
higher layer; this is what they offer to operators.
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Protocol

import torch
from torch import Tensor

from shardwright.layout import Layout
from shardwright.tensor.base.capture import capture_call, is_capturing
from shardwright.tensor.base.gradient_types import ENTERED, REPLICATE, without_entered
from shardwright.tensor.base.tagging import DTensorBase
from shardwright.tensor.redistribute.autograd import redistribute_local

__all__ = ["GatheringUnit", "gathered_by_unit", "saving_by_unit"]


class GatheringUnit(Protocol):
    """A set of parameters that are gathered by one collective, and whose gradients are reduced by one."""

    @property
    def mesh_dims(self) -> frozenset[int]:
        """The mesh dimensions over which parameters are gathered and gradients summed: what it returns is Entered."""
        ...

    def demand(self, index: int) -> Tensor:
        """Return a gathered parameter as a plain tensor, differentiably; gather the unit if it is not gathered yet."""
        ...

    def saving(self) -> AbstractContextManager[None]:
        """Return a context in which autograd saves gathered parameters as references to their units.

        The context of one unit serves all of its kind.
        """
        ...


def gathered_by_unit(tensor: DTensorBase, source: Layout, target: Layout) -> Tensor | None:
    """Return a parameter redistributed to `target` from what its unit has gathered.

    Return None if it belongs to no unit, or `target` shards it over a mesh dimension over which the unit gathers it.
    """
    if "_unit" not in tensor.__dict__:
        return None
    unit: GatheringUnit = tensor.__dict__["_unit"][0]
    if any(target.placements[mesh_dim] not in (REPLICATE, ENTERED) for mesh_dim in unit.mesh_dims):
        return None
    if is_capturing():
        return capture_call(_from_unit, tensor, source, target)  # type: ignore[no-any-return]  # it is that function's
    return _from_unit(tensor, source, target)


def _from_unit(tensor: DTensorBase, source: Layout, target: Layout) -> Tensor:
    unit: GatheringUnit
    unit, index = tensor.__dict__["_unit"]
    placements = [ENTERED if m in unit.mesh_dims else placement for m, placement in enumerate(source.placements)]
    layout = source.replace(placements=placements)
    if not (tensor.requires_grad and torch.is_grad_enabled()):
        layout, target = without_entered(layout), without_entered(target)
    return redistribute_local(unit.demand(index), layout, target)


def saving_by_unit(tensor: DTensorBase) -> AbstractContextManager[None] | None:
    """Return the context in which an operator on a parameter is called if it belongs to a unit; None if it does not."""
    if "_unit" not in tensor.__dict__:
        return None
    unit: GatheringUnit = tensor.__dict__["_unit"][0]
    return unit.saving()
