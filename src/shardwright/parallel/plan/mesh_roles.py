"""What each mesh dimension is used for, by its name."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from shardwright import comm
from shardwright.errors import MeshError
from shardwright.layout import Mesh

__all__ = ["CONTEXT", "EXPERTS", "NAMES", "TENSOR", "MeshRoles", "mesh_roles", "roles_of"]

FULLY_SHARDED = "dp"  # data parallel; parameters are sharded, and gathered where they are used
REPLICATED = "replicate"  # data parallel; parameters are replicated
CONTEXT = "cp"  # context parallel: sequences are sharded; parameters as over dp
EXPERTS = "ep"  # expert parallel: experts are distributed; for all other layers as dp
TENSOR = "tp"  # tensor parallel
NAMES = (FULLY_SHARDED, REPLICATED, CONTEXT, EXPERTS, TENSOR)


@dataclass(frozen=True, slots=True)
class MeshRoles:
    """A mesh with the indices of its dimensions by what they are used for."""

    mesh: Mesh
    samples: tuple[int, ...] = ()  # that shard batches
    gathered: tuple[int, ...] = ()  # that shard parameters, which are gathered where they are used
    replicated: int | None = None  # that shards batches, but not parameters
    context: int | None = None  # that shards sequences
    experts: int | None = None  # that distributes experts
    tensor: int | None = None

    def size(self, mesh_dim: int | None) -> int:
        """Return the number of ranks along a mesh dimension; 1 if there is no such dimension."""
        return 1 if mesh_dim is None else self.mesh.shape[mesh_dim]


def mesh_roles(mesh: Any, what: str) -> MeshRoles:
    """Return the mesh with the roles of its dimensions; raise `MeshError` if one has no name or an unknown one."""
    bound = comm.bind(mesh)
    names = bound.names
    if names is None or any(name not in NAMES for name in names):
        raise MeshError(
            f"{what}: the dimensions of {bound!r} must be named, each one of 'dp' (data parallel, parameters sharded), "
            "'replicate' (data parallel, parameters replicated), 'cp' (context parallel, sequences sharded), 'ep' "
            '(expert parallel) and \'tp\' (tensor parallel): pass mesh_dim_names=("dp", "tp") to init_device_mesh'
        )
    return roles_of(bound)


def roles_of(mesh: Mesh) -> MeshRoles:
    """Return the roles of the dimensions of a mesh that have known names.

    >>> roles_of(Mesh((2, 4), ("dp", "tp"))).tensor
    1
    """
    names = mesh.names or ()

    def indices(*wanted: str) -> tuple[int, ...]:
        return tuple(index for index, name in enumerate(names) if name in wanted)

    def index(wanted: str) -> int | None:
        return names.index(wanted) if wanted in names else None

    return MeshRoles(
        mesh,
        indices(FULLY_SHARDED, REPLICATED, EXPERTS),
        indices(FULLY_SHARDED, CONTEXT, EXPERTS),
        index(REPLICATED),
        index(CONTEXT),
        index(EXPERTS),
        index(TENSOR),
    )
