"""Which process groups a plan's steps run on."""

from __future__ import annotations

from typing import Protocol, final

from shardwright import comm
from shardwright.layout import Mesh

__all__ = ["Groups", "WorldGroups"]


class Groups(Protocol):
    """What binds a plan, which knows ranks only, to the groups of a process: who I am, and with whom I talk.

    >>> isinstance(WorldGroups().rank, int)
    True
    """

    @property
    def rank(self) -> int:
        """The global rank of this process."""
        ...

    @property
    def everyone(self) -> comm.Group:
        """A group that has all ranks of the plan among its own: point to point needs no group of just them."""
        ...

    def group_along(self, mesh: Mesh, mesh_dim: int) -> comm.Group:
        """The ranks that differ from this one along one mesh dimension."""
        ...

    def group_of(self, ranks: tuple[int, ...]) -> comm.Group:
        """These ranks, ascending; this one is among them."""
        ...


@final
class WorldGroups:
    """Groups of the bound DeviceMesh, or of the default process group, made on first use; the world where it is meant.

    >>> WorldGroups().group_along(Mesh((1,)), 0)
    Group(ranks=(0,), rank=0)
    """

    @property
    def rank(self) -> int:
        """The global rank of this process."""
        world = comm.world()
        return world.ranks[world.rank]

    @property
    def everyone(self) -> comm.Group:
        """The world."""
        return comm.world()

    def group_along(self, mesh: Mesh, mesh_dim: int) -> comm.Group:
        """The ranks that differ from this one along one mesh dimension: the DeviceMesh's own group, if it has one."""
        return comm.group_along(mesh, mesh_dim)

    def group_of(self, ranks: tuple[int, ...]) -> comm.Group:
        """These ranks, ascending; this one is among them."""
        return comm.subgroup(ranks)
