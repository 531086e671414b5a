"""Select modules of a model by patterns: those to recompute, and those whose parameters form a unit."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from torch import nn

from shardwright.errors import PlanError
from shardwright.parallel.plan.patterns import Pattern
from shardwright.parallel.plan.resolve import Resolved
from shardwright.parallel.plan.structure import repeated_blocks

__all__ = ["UnitGroup", "selected_modules", "unit_groups"]


def selected_modules(model: nn.Module, selection: bool | str | Sequence[str] | None, what: str) -> list[str]:
    """Return the names of the modules that patterns select; all repeated blocks for True, none for False or None."""
    if selection is None or selection is False:
        return []
    if selection is True:
        blocks = repeated_blocks(model)
        if not blocks:
            raise PlanError(f"parallelize: {what}=True, but the model has no repeated blocks: pass patterns instead")
        return blocks
    found: list[str] = []
    for text in [selection] if isinstance(selection, str) else selection:
        matched = [name for name, _ in model.named_modules() if name and Pattern(text).matches(name)]
        if not matched:
            raise PlanError(f"parallelize: {what} pattern {text!r} matches no module")
        found += matched
    return list(dict.fromkeys(found))


class UnitGroup(NamedTuple):
    """The names of the parameters of a unit, and the mesh dimensions over which they are gathered."""

    names: tuple[str, ...]
    mesh_dims: tuple[int, ...]


def unit_groups(
    model: nn.Module, resolved: Resolved, units: bool | str | Sequence[str] | None
) -> tuple[UnitGroup, ...]:
    """Return the parameters of each unit, those outside of all selected modules first.

    A module whose parameters are gathered over different mesh dimensions, as experts are, has a unit for each. A
    parameter that is tied between units belongs to the first group. Units that overlap raise `PlanError`.
    """
    if units is False:
        return ()
    modules = repeated_blocks(model) if units is None else selected_modules(model, units, "units")
    for name in modules:
        outer = next((other for other in modules if name.startswith(f"{other}.")), None)
        if outer is not None:
            raise PlanError(f"parallelize: the units {outer!r} and {name!r} overlap: one is inside the other")
    most = max((parameter.unit_dims for parameter in resolved.parameters), key=len, default=())
    groups: dict[tuple[str, tuple[int, ...]], list[str]] = {(name, most): [] for name in ("", *modules)}
    for parameter in resolved.parameters:
        if parameter.unit_dims:
            owners = {next((unit for unit in modules if name.startswith(f"{unit}.")), "") for name in parameter.names}
            owner = owners.pop() if len(owners) == 1 else ""
            groups.setdefault((owner, parameter.unit_dims), []).append(parameter.names[0])
    return tuple(UnitGroup(tuple(names), mesh_dims) for (_, mesh_dims), names in groups.items())
