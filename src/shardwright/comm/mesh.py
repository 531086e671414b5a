"""Bind abstract meshes to PyTorch's `DeviceMesh` and to process groups."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import HashStore
from torch.distributed import device_mesh
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.device_mesh import init_device_mesh as _init_device_mesh

from shardwright.comm.group import Group, mesh_group, on_forget, subgroup, world
from shardwright.errors import MeshError
from shardwright.layout import Mesh

__all__ = [
    "DeviceMesh",
    "bind",
    "current_mesh",
    "device_mesh_of",
    "entered_mesh",
    "group_along",
    "init_device_mesh",
    "init_world_mesh",
    "known_meshes",
    "rank",
]

_abstract: dict[int, tuple[DeviceMesh, Mesh]] = {}  # by identity: hashing a DeviceMesh is slow
_bound: dict[Mesh, DeviceMesh] = {}  # the DeviceMesh whose groups are used
_latest: dict[tuple[Mesh, str], DeviceMesh] = {}  # by device type
_lines: dict[tuple[Mesh, int], Group] = {}


def init_device_mesh(
    device_type: str,
    mesh_shape: Sequence[int],
    *,
    mesh_dim_names: Sequence[str] | None = None,
    backend_override: Mapping[int | str, Any] | None = None,
) -> DeviceMesh:
    """Return a DeviceMesh of this shape, made by PyTorch's function of the same name.

    It may change two things of the process:

    - *It may start the default process group.* If there is none, PyTorch starts it from the variables of a launcher
      such as `torchrun` (`RANK`, `WORLD_SIZE`, `MASTER_ADDR`, …). If `RANK` is not set, a group of this one process is
      started instead (nccl for "cuda", else gloo), so that the same script runs under `torchrun` and as a plain
      process. Call `torch.distributed.init_process_group` before it to choose the backend or the timeout.
    - *For "cuda", it may choose the current device.* If the launcher sets `LOCAL_RANK`, PyTorch selects that device,
      unless CUDA is initialized already. Otherwise the device is the rank modulo the number of devices, even if another
      one was current.

    `backend_override` is PyTorch's: backends or their options, by mesh dimension.

    >>> init_device_mesh("cpu", (1,), mesh_dim_names=("dp",)).size()
    1
    """
    if not dist.is_initialized() and "RANK" not in os.environ:
        backend = "nccl" if device_type == "cuda" else "gloo"
        dist.init_process_group(backend, store=HashStore(), rank=0, world_size=1)
    if device_type == "cuda" and "LOCAL_RANK" not in os.environ:
        torch.cuda.set_device(dist.get_rank() % torch.cuda.device_count())  # otherwise the launcher has chosen
    names = None if mesh_dim_names is None else tuple(mesh_dim_names)
    override: dict[str, Any] = {} if backend_override is None else {"backend_override": dict(backend_override)}
    mesh = _init_device_mesh(device_type, tuple(mesh_shape), mesh_dim_names=names, **override)
    bind(mesh)
    return mesh


def init_world_mesh(device_type: str) -> DeviceMesh:
    """Return a one-dimensional DeviceMesh of all ranks; start the default process group as `init_device_mesh` does.

    >>> init_world_mesh("cpu").size()
    1
    """
    if not dist.is_initialized() and "RANK" in os.environ:
        dist.init_process_group()  # from the variables of the launcher: only then is the number of ranks known
    return init_device_mesh(device_type, (world().size,))


def bind(mesh: DeviceMesh | Mesh) -> Mesh:
    """Return the abstract mesh of a DeviceMesh, whose process groups it uses from now on.

    >>> bind(Mesh((1,)))
    Mesh(1)
    """
    if isinstance(mesh, Mesh):
        return mesh
    known = _abstract.get(id(mesh))
    if known is None:
        world()  # detects a new world and drops the meshes of the old one
        known = _abstract[id(mesh)] = (mesh, Mesh.of(mesh))
        _bound.setdefault(known[1], mesh)
        _latest[known[1], mesh.device_type] = mesh
    return known[1]


def entered_mesh() -> DeviceMesh | None:
    """Return the DeviceMesh of the innermost `with device_mesh:`, or None if there is none.

    >>> entered_mesh() is None
    True
    """
    entered: list[DeviceMesh] = device_mesh._mesh_resources.mesh_stack
    return entered[-1] if entered else None


def current_mesh() -> Mesh:
    """Return the mesh of the innermost `with device_mesh:`, or the mesh of all ranks in one dimension if there is none.

    >>> with init_device_mesh("cpu", (1,), mesh_dim_names=("dp",)):
    ...     current_mesh()
    Mesh(dp=1)
    """
    entered = entered_mesh()
    return bind(entered) if entered is not None else Mesh((world().size,), ranks=world().ranks)


def device_mesh_of(mesh: Mesh, device_type: str | None = None) -> DeviceMesh:
    """Return the DeviceMesh bound to an abstract mesh: the latest, preferably of this device type.

    >>> device_mesh = init_device_mesh("cpu", (1,))
    >>> device_mesh_of(bind(device_mesh)) is device_mesh
    True
    """
    world()  # drops meshes of an earlier world
    found = _latest.get((mesh, device_type)) if device_type is not None else None
    found = found or next((each for (known, _), each in reversed(_latest.items()) if known is mesh), None)
    if found is None:
        raise MeshError(
            f"{mesh!r} has no DeviceMesh in this process: create one with init_device_mesh, or pass it to bind"
        )
    return found


def group_along(mesh: Mesh, dim: int) -> Group:
    """Return the Group of the ranks that differ from this one only along one dimension of a mesh.

    >>> group_along(Mesh((1,)), 0).size
    1
    """
    if world().simulated:
        return subgroup(sorted(mesh.peers(rank(), dim)))
    group = _lines.get((mesh, dim))
    if group is None:
        device_mesh = _bound.get(mesh)
        if device_mesh is not None and mesh.shape[dim] > 1:
            group = mesh_group(device_mesh, dim)
        else:
            group = subgroup(sorted(mesh.peers(rank(), dim)))
        _lines[mesh, dim] = group
    return group


def rank() -> int:
    """Return this process's global rank; 0 for a single process.

    >>> rank()
    0
    """
    everyone = world()
    return everyone.global_rank


def known_meshes() -> list[DeviceMesh]:
    """Return the DeviceMeshes that were bound in this process.

    >>> isinstance(known_meshes(), list)
    True
    """
    return [mesh for mesh, _ in _abstract.values()]


def _forget_meshes() -> None:
    _abstract.clear()
    _bound.clear()
    _latest.clear()
    _lines.clear()


on_forget(_forget_meshes)
