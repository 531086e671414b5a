"""`unit_of`: make a unit of DTensors, which operators then gather through it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from shardwright import comm
from shardwright.errors import MeshMismatchError
from shardwright.parallel.units.precision import MixedPrecisionPolicy
from shardwright.parallel.units.schedule import Schedule
from shardwright.parallel.units.split import peers_along, split_along
from shardwright.parallel.units.unit import Unit

__all__ = ["unit_of"]


def unit_of(
    parameters: Sequence[Any],
    sharded: int | Sequence[int],
    *,
    replicated: int | None = None,
    precision: MixedPrecisionPolicy | None = None,
    mean: bool = False,
    reshard_after_forward: bool = True,
    schedule: Schedule | None = None,
    parent: Unit | None = None,
    names: Sequence[str] = (),
) -> Unit:
    """Return a unit of DTensors that are sharded over the mesh dimensions `sharded`, over which it gathers them.

    Their gradients are summed over those mesh dimensions and over `replicated`, on which the parameters are replicated;
    with `mean` they are averaged. All parameters are on one mesh. Every rank of the mesh makes the same units in the
    same order.

    >>> import torch, shardwright as sw
    >>> mesh = sw.init_device_mesh("cpu", (1,))
    >>> weight = sw.distribute_tensor(torch.ones(2, 3, requires_grad=True), mesh, [sw.Shard(0)])
    >>> unit_of([weight], 0).demand(0).shape
    torch.Size([2, 3])
    """
    meshes = dict.fromkeys(parameter.sharding.mesh for parameter in parameters)
    if len(meshes) != 1:
        found = ", ".join(map(repr, meshes)) or "none"
        raise MeshMismatchError(f"a unit needs parameters that are all on one mesh, got {found}")
    (mesh,) = meshes
    over = (sharded,) if isinstance(sharded, int) else tuple(sharded)
    return Unit(
        parameters,
        [split_along(parameter.sharding, *over) for parameter in parameters],
        comm.group_along(mesh, over[0])
        if len(over) == 1
        else comm.subgroup(sorted(peers_along(mesh, over, comm.rank()))),
        replicas=None if replicated is None else comm.group_along(mesh, replicated),
        mesh_dims=frozenset(over if replicated is None else (*over, replicated)),
        precision=precision,
        mean=mean,
        reshard_after_forward=reshard_after_forward,
        schedule=schedule,
        parent=parent,
        number=comm.world().ledger.number_tensor(mesh),
        names=names,
    )
