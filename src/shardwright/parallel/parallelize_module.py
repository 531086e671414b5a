"""`parallelize_module` and `loss_parallel`, with the names and semantics of `torch.distributed.tensor.parallel`."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from torch import nn

from shardwright import comm
from shardwright.errors import MeshError, PlanError
from shardwright.parallel.distribute import agree_on_plan, distribute_parameter
from shardwright.parallel.module_io import install
from shardwright.parallel.plan.mesh_roles import MeshRoles
from shardwright.parallel.plan.plan import Plan
from shardwright.parallel.plan.resolve import Resolved, resolve
from shardwright.parallel.plan.styles import ParallelStyle

__all__ = ["loss_parallel", "parallelize_module"]


def parallelize_module(
    module: nn.Module,
    device_mesh: Any = None,
    parallelize_plan: ParallelStyle | Mapping[str, object] | None = None,
    *,
    src_data_rank: int | None = 0,
) -> nn.Module:
    """Parallelize parts of a module over a mesh of one dimension, as PyTorch's function of the same name does.

    Plain local tensors go in and come out of the parallelized parts: a style's `input_layouts` say how they are placed,
    and with `use_local_output` (the default) the output is a plain local tensor. Parameters that no pattern matches
    stay plain. A `parallelize_plan` that is a single style is for the module itself.

    Unlike PyTorch, a pattern that matches nothing raises `PlanError`, tied parameters stay tied, and `**` matches any
    number of parts of a name. For a whole model whose activations are DTensors, see `parallelize`.

    >>> import torch, shardwright as sw
    >>> mesh = sw.init_device_mesh("cpu", (1,), mesh_dim_names=("tp",))
    >>> model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.ReLU(), torch.nn.Linear(8, 2))
    >>> _ = sw.parallelize_module(model, mesh, {"0": sw.ColwiseParallel(), "2": sw.RowwiseParallel()})
    >>> type(model(torch.ones(3, 4))).__name__
    'Tensor'
    """
    mesh = comm.current_mesh() if device_mesh is None else comm.bind(device_mesh)
    if mesh.ndim != 1:
        raise MeshError(f"parallelize_module: the mesh must have one dimension, got {mesh!r}: pass mesh['tp']")
    plan = Plan({"": parallelize_plan} if isinstance(parallelize_plan, ParallelStyle) else parallelize_plan)
    if not plan:
        raise PlanError("parallelize_module: the plan is empty: pass a style, or a mapping of patterns to styles")
    roles = MeshRoles(mesh, tensor=0)

    def decide() -> Resolved:
        return resolve(module, plan, roles, what="parallelize_module", partial=True)

    resolved = agree_on_plan(decide, mesh, "parallelize_module")
    for decided in resolved.parameters:
        if decided.layout is not None:
            parameter = module.get_parameter(decided.names[0])
            distributed = distribute_parameter(parameter, device_mesh, decided.layout, src_data_rank)
            for name in decided.names:
                owner, _, key = name.rpartition(".")
                module.get_submodule(owner).register_parameter(key, distributed)
    modules = dict(module.named_modules())
    for name, style in resolved.modules:
        install(modules[name], style, mesh, 0, local=True)
    return module


@contextmanager
def loss_parallel() -> Iterator[None]:
    """Compute the cross entropy of logits that are sharded over classes without gathering them.

    It is always computed so: the context changes nothing, and is there for programs written for PyTorch.

    >>> import torch, shardwright as sw
    >>> mesh = sw.init_device_mesh("cpu", (1,), mesh_dim_names=("tp",))
    >>> logits = sw.ones(2, 8, mesh=mesh, placements=[sw.Shard(1)])
    >>> with sw.loss_parallel():
    ...     loss = torch.nn.functional.cross_entropy(logits, sw.zeros(2, dtype=torch.long, mesh=mesh))
    """
    yield
