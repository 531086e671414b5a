"""The process groups on which the steps of a plan run."""

from __future__ import annotations

from typing import Protocol, final

from shardwright import comm
from shardwright.layout import Mesh

__all__ = ["Groups", "WorldGroups"]


class Groups(Protocol):
    """Maps the ranks of a plan to this process: its own rank and its process groups.

    >>> isinstance(WorldGroups().rank, int)
    True
    """

    @property
    def rank(self) -> int:
        """The global rank of this process."""
        ...

    @property
    def everyone(self) -> comm.Group:
        """A group that contains all ranks of the plan, for point-to-point messages."""
        ...

    def group_along(self, mesh: Mesh, mesh_dim: int) -> comm.Group:
        """Return the group of ranks that differ from this one along one mesh dimension."""
        ...

    def group_of(self, ranks: tuple[int, ...]) -> comm.Group:
        """Return the group of these ranks: ascending, with this rank among them."""
        ...


@final
class WorldGroups:
    """Groups of the bound DeviceMesh, else subgroups of the default process group, created on first use.

    >>> WorldGroups().group_along(Mesh((1,)), 0)
    Group(ranks=(0,), rank=0)
    """

    @property
    def rank(self) -> int:
        """The global rank of this process."""
        world = comm.world()
        return world.global_rank

    @property
    def everyone(self) -> comm.Group:
        """The world."""
        return comm.world()

    def group_along(self, mesh: Mesh, mesh_dim: int) -> comm.Group:
        """Return the group of ranks along one mesh dimension; the DeviceMesh's own group if it has one."""
        return comm.group_along(mesh, mesh_dim)

    def group_of(self, ranks: tuple[int, ...]) -> comm.Group:
        """Return the group of these ranks: ascending, with this rank among them."""
        return comm.subgroup(ranks)
