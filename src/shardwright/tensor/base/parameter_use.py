"""How a parameter is used: over which mesh dimensions it is gathered at use, and over which it stays sharded.

The use of a parameter is stated once, and the dispatcher then keeps the layouts that were chosen. Over the mesh
dimensions in `gathered`, operators gather the parameter and leave activations where they are (fully sharded data
parallelism). Over all others they leave a sharded parameter where it is and bring activations to it (tensor
parallelism). Values computed from such parameters alone, such as `w.T` or `w.float()`, have the same use.

A tensor with a use has its own class, because the fast paths of the dispatcher, whose keys are layouts, must not apply.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from shardwright.errors import ArgumentTypeError, TensorError
from shardwright.tensor.base.strategy import ParameterUse
from shardwright.tensor.base.tagging import DTensorBase

__all__ = ["ParameterUse", "copy_use", "parameter_use", "set_parameter_use"]


def set_parameter_use(parameter: Tensor, use: ParameterUse) -> None:
    """Record how a parameter is used. Copies of it, and values computed from it alone, are used in the same way.

    >>> import torch, shardwright as sw
    >>> mesh = sw.init_device_mesh("cpu", (1,), mesh_dim_names=("dp",))
    >>> weight = torch.nn.Parameter(sw.ones(4, 4, mesh=mesh, placements=[sw.Shard(0)]))
    >>> set_parameter_use(weight, ParameterUse(frozenset({0})))
    >>> parameter_use(weight.T)
    ParameterUse(gathered=frozenset({0}), dtype=None)
    """
    if not isinstance(parameter, DTensorBase):
        raise ArgumentTypeError(
            f"set_parameter_use: expected a DTensor, got {type(parameter).__name__}: distribute the parameter first"
        )
    mesh = parameter._layout.mesh
    unknown = sorted(mesh_dim for mesh_dim in use.gathered if not 0 <= mesh_dim < mesh.ndim)
    if unknown:
        raise TensorError(
            f"set_parameter_use: mesh dimensions must be 0 to {mesh.ndim - 1} for {mesh!r}, got {unknown[0]}"
        )
    parameter._use = use
    if type(parameter) is DTensorBase.concrete:
        parameter.__class__ = DTensorBase.parameter_values


def parameter_use(tensor: Any) -> ParameterUse | None:
    """Return the use recorded for a parameter, or for the parameters a value was computed from; None if there is none.

    >>> import torch
    >>> parameter_use(torch.ones(2)) is None
    True
    """
    use: ParameterUse | None = tensor.__dict__.get("_use") if isinstance(tensor, DTensorBase) else None
    return use


def copy_use(target: DTensorBase, source: DTensorBase) -> None:
    """Record the use of `source`, if it has one, for `target`, which is on the same mesh."""
    use = source.__dict__.get("_use")
    if use is not None:
        set_parameter_use(target, use)
