"""The context in which a step runs: the plan, this rank and its process groups."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeAlias, final

from torch import Tensor

from shardwright import comm
from shardwright.layout import Mesh
from shardwright.tensor.redistribute.groups import Groups
from shardwright.tensor.redistribute.plan import Plan
from shardwright.tensor.redistribute.steps import Step, line

__all__ = ["ExecutionContext", "Finish"]

Finish: TypeAlias = Callable[[], Tensor]


@final
@dataclass(frozen=True, slots=True)
class ExecutionContext:
    """The plan, this rank and its process groups."""

    plan: Plan
    rank: int
    groups: Groups

    def rounds(self, step: Step) -> int:
        """Return the number of rounds of the step."""
        return self.plan.rounds(step)

    def group(self, mesh: Mesh, mesh_dims: tuple[int, ...]) -> comm.Group:
        """Return the group of ranks that differ from this one in these mesh dimensions only."""
        if len(mesh_dims) == 1:
            return self.groups.group_along(mesh, mesh_dims[0])
        return self.groups.group_of(line(mesh, mesh_dims, self.rank))
