"""What each mesh dimension is used for, by its name."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from shardwright import comm
from shardwright.errors import MeshError
from shardwright.layout import Mesh

__all__ = ["CONTEXT", "NAMES", "MeshRoles", "mesh_roles"]

FULLY_SHARDED = "dp"  # data parallel; parameters are sharded, and gathered where they are used
REPLICATED = "replicate"  # data parallel; parameters are replicated
CONTEXT = "cp"  # context parallel: sequences are sharded; parameters as over dp
TENSOR = "tp"  # tensor parallel
NAMES = (FULLY_SHARDED, REPLICATED, CONTEXT, TENSOR)


@dataclass(frozen=True, slots=True)
class MeshRoles:
    """A mesh with the indices of its dimensions by what they are used for."""

    mesh: Mesh
    samples: tuple[int, ...] = ()  # that shard batches
    gathered: tuple[int, ...] = ()  # that shard parameters, which are gathered where they are used
    replicated: int | None = None  # that shards batches, but not parameters
    context: int | None = None  # that shards sequences
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
            "'replicate' (data parallel, parameters replicated), 'cp' (context parallel, sequences sharded) and 'tp' "
            '(tensor parallel): pass mesh_dim_names=("dp", "tp") to init_device_mesh'
        )

    def indices(*wanted: str) -> tuple[int, ...]:
        return tuple(index for index, name in enumerate(names) if name in wanted)

    def index(wanted: str) -> int | None:
        return names.index(wanted) if wanted in names else None

    return MeshRoles(
        bound,
        indices(FULLY_SHARDED, REPLICATED),
        indices(FULLY_SHARDED, CONTEXT),
        index(REPLICATED),
        index(CONTEXT),
        index(TENSOR),
    )
