"""What each mesh dimension is used for, by its name."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from shardwright import comm
from shardwright.errors import MeshError
from shardwright.layout import Mesh

__all__ = ["DATA", "FULLY_SHARDED", "NAMES", "TENSOR", "MeshRoles", "mesh_roles"]

FULLY_SHARDED = "dp"  # data parallel; parameters are sharded, and gathered where they are used
REPLICATED = "replicate"  # data parallel; parameters are replicated
TENSOR = "tp"  # tensor parallel
DATA = (FULLY_SHARDED, REPLICATED)
NAMES = (FULLY_SHARDED, REPLICATED, TENSOR)


@dataclass(frozen=True, slots=True)
class MeshRoles:
    """A mesh with the indices of its data, fully sharding and tensor-parallel dimensions."""

    mesh: Mesh
    data: tuple[int, ...]
    fully_sharded: int | None
    tensor: int | None

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
            "'replicate' (data parallel, parameters replicated) and 'tp' (tensor parallel): pass "
            'mesh_dim_names=("dp", "tp") to init_device_mesh'
        )
    return MeshRoles(
        bound,
        tuple(index for index, name in enumerate(names) if name in DATA),
        names.index(FULLY_SHARDED) if FULLY_SHARDED in names else None,
        names.index(TENSOR) if TENSOR in names else None,
    )
