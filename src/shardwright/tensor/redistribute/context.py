"""Where a step is run from: this rank, its groups, and how much may be in flight."""

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
    """One rank's place at a plan."""

    plan: Plan
    rank: int
    groups: Groups

    def rounds(self, step: Step) -> int:
        """In how many rounds the step moves its bytes."""
        return self.plan.rounds(step)

    def group(self, mesh: Mesh, mesh_dims: tuple[int, ...]) -> comm.Group:
        """The ranks that differ from this one in these mesh dimensions only."""
        if len(mesh_dims) == 1:
            return self.groups.group_along(mesh, mesh_dims[0])
        return self.groups.group_of(line(mesh, mesh_dims, self.rank))
