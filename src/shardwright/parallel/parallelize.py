"""`parallelize`: distribute a model over a mesh, as a plan says."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint as run_checkpointed

from shardwright.errors import ArgumentTypeError, PlanError
from shardwright.parallel.context import ContextParallel
from shardwright.parallel.context.install import ContextInstallation, decide_context
from shardwright.parallel.distribute import agree_on_plan, distribute_parameter
from shardwright.parallel.experts import ExpertParallel
from shardwright.parallel.experts.install import ExpertInstallation, decide_experts
from shardwright.parallel.forward import ReplicatingMethod, replicate_plain_tensors
from shardwright.parallel.module_io import install
from shardwright.parallel.plan.auto import auto_plan
from shardwright.parallel.plan.mesh_roles import mesh_roles
from shardwright.parallel.plan.plan import Plan
from shardwright.parallel.plan.resolve import Resolved, resolve
from shardwright.parallel.plan.select import UnitGroup, selected_modules, unit_groups
from shardwright.parallel.plan.structure import repeated_blocks
from shardwright.parallel.running import RunningModel
from shardwright.parallel.units import MixedPrecisionPolicy
from shardwright.tensor import distribute_module, implicit_replication
from shardwright.tensor.base.parameter_use import ParameterUse, set_parameter_use
from shardwright.tensor.base.sequence_attention import SequenceAttention, attend_sequences_by, sequence_attention

__all__ = ["parallelize"]


def parallelize(
    model: nn.Module,
    mesh: Any,
    plan: str | Mapping[str, object] = "auto",
    *,
    units: bool | str | list[str] | None = None,
    precision: MixedPrecisionPolicy | None = None,
    reshard_after_forward: bool = True,
    checkpoint: bool | str | list[str] | None = None,
    context: ContextParallel | None = None,
    experts: ExpertParallel | None = None,
) -> nn.Module:
    """Distribute a model over a mesh, in place, and return it; from here it is trained like a plain model.

    The dimensions of the mesh are used by name:

    - `dp`: data parallel and fully sharded. Parameters, gradients and optimizer states are sharded along their first
      dimension, inside their shard over `tp` (along the second if attention heads split the first unevenly); a
      parameter is gathered where it is used, and its gradient reduce-scattered.
    - `replicate`: data parallel. Parameters are replicated, and their gradients all-reduced. With `dp`, this is hybrid
      sharding.
    - `cp`: context parallel. Sequences are sharded, and attention is computed as `context` says: a `ContextParallel`,
      by default `ContextParallel("gather")`. Parameters are sharded over `dp` and `cp` together, as if they were one.
    - `ep`: expert parallel. Every rank has some experts of each layer, and tokens are sent to them: `ExpertParallel`.
      For all other layers it is like `dp`: `dp`, `cp` and `ep` are as one.
    - `tp`: tensor parallel. Parameters are sharded as the plan says, and stay so; activations are redistributed.

    Pass batches through `shard_batch(batch, mesh)`; plain inputs are refused, because each rank may hold others. Plain
    tensors that the model's code makes itself (`torch.arange`, masks) count as replicated, in its forward, in
    `generate` and in `init_weights`.

    `plan` is a `Plan` or a mapping of patterns to styles; `"auto"` reads the plan that a model of `transformers`
    states, or finds one, see `auto_plan`. With `tp` it must decide every parameter. Everything wrong is found before
    anything is changed, and raised as one `PlanError` on all ranks.

    Parameters that are sharded over `dp` are gathered in units: one for each repeated block, and one for the rest. A
    unit is gathered by one collective where the first of its parameters is used, released when another unit is,
    gathered again in backward, and its gradients are reduced by one collective. `units` are patterns of other modules
    to make units of, or `False` to gather each parameter by itself. `reshard_after_forward=False` keeps units until
    backward. `precision` says in which dtypes parameters are gathered and gradients reduced.

    `checkpoint=True` recomputes the activations of every repeated block in backward; a pattern or a list of them
    selects modules.

    Values are those of the first rank. A model on the meta device gets none: call `to_empty` and initialize it
    afterwards, with random numbers that do not depend on the mesh, or load a checkpoint. Tied parameters stay tied;
    buffers are replicated.

    >>> import torch, shardwright as sw
    >>> mesh = sw.init_device_mesh("cpu", (1, 1), mesh_dim_names=("dp", "tp"))
    >>> model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.ReLU(), torch.nn.Linear(8, 2))
    >>> _ = sw.parallelize(model, mesh, {"0": sw.ColwiseParallel(), "2": sw.RowwiseParallel()})
    >>> print(model[2].weight.sharding)
    [2, 8] (dp: S(0), tp: S(1))
    >>> model(sw.shard_batch(torch.ones(3, 4), mesh)).sum().backward()
    """
    if not isinstance(model, nn.Module):
        raise ArgumentTypeError(f"parallelize: expected a module, got {type(model).__name__}")
    roles = mesh_roles(mesh, "parallelize")

    def decide() -> _ModelPlan:
        if isinstance(plan, str) and plan != "auto":
            raise PlanError(f"parallelize: plan must be 'auto' or a mapping of patterns to styles, got {plan!r}")
        chosen = auto_plan(model, mesh) if isinstance(plan, str) else Plan(plan)
        distributed = decide_experts(model, experts, roles)
        names = frozenset[str]() if distributed is None else distributed.parameters
        resolved = resolve(model, chosen, roles, what="parallelize", experts=names)
        groups = unit_groups(model, resolved, units)
        checkpointed = selected_modules(model, checkpoint, "checkpoint")
        return _ModelPlan(resolved, groups, checkpointed, precision, decide_context(model, context, roles), distributed)

    decided = agree_on_plan(decide, roles.mesh, "parallelize")
    _distribute(model, mesh, decided.resolved, None if precision is None else precision.param_dtype)
    modules = dict(model.named_modules())
    if roles.tensor is not None:
        for name, style in decided.resolved.modules:
            install(modules[name], style, roles.mesh, roles.tensor, local=False)
    for name in decided.checkpointed:
        modules[name].__dict__["forward"] = _Checkpointed(modules[name])
    blocks = repeated_blocks(model)
    if decided.experts is not None:
        decided.experts.install(model)
    attention = None if decided.context is None else decided.context.install(model)
    replicate_plain_tensors([modules[name] for name in dict.fromkeys(["", *blocks, *decided.checkpointed])], attention)
    RunningModel(roles, decided.groups, precision, reshard_after_forward).install(model)
    for name in ("generate", "init_weights"):
        if callable(getattr(type(model), name, None)):
            model.__dict__[name] = ReplicatingMethod(model, name)
    return model


class _ModelPlan(NamedTuple):
    """What `parallelize` does, the same on all ranks."""

    resolved: Resolved
    groups: tuple[UnitGroup, ...]  # that of the model first
    checkpointed: list[str]
    precision: MixedPrecisionPolicy | None
    context: ContextInstallation | None
    experts: ExpertInstallation | None


def _distribute(model: nn.Module, mesh: Any, resolved: Resolved, dtype: torch.dtype | None) -> None:
    """Make parameters and buffers DTensors; ignored parameters stay plain."""
    by_name = {parameter.names[0]: parameter for parameter in resolved.parameters}
    ignored = _take_out(model, [name for each in resolved.parameters if each.layout is None for name in each.names])
    try:

        def partition(name: str, module: nn.Module, _: Any) -> None:
            for key, parameter in list(module.named_parameters(recurse=False)):
                decided = by_name.get(f"{name}.{key}" if name else key)
                if decided is not None and decided.layout is not None:
                    module.register_parameter(key, distribute_parameter(parameter, mesh, decided.layout))

        distribute_module(model, mesh, partition)
    finally:
        for table, key, parameter in ignored:
            table[key] = parameter
    for each in resolved.parameters:
        if each.layout is not None:
            set_parameter_use(model.get_parameter(each.names[0]), ParameterUse(each.gathered, dtype))


def _take_out(model: nn.Module, names: list[str]) -> list[tuple[dict[str, Any], str, Any]]:
    """Take parameters out of a model, keeping their slots, and return how to put them back."""
    taken = []
    for name in names:
        owner, _, key = name.rpartition(".")
        table = model.get_submodule(owner)._parameters
        taken.append((table, key, table[key]))
        table[key] = None
    return taken


class _Checkpointed:
    """The forward of a module whose activations are recomputed in backward; copied and pickled with the module."""

    def __init__(self, module: nn.Module) -> None:
        self.module = module

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        forward = type(self.module).forward
        if not torch.is_grad_enabled():
            return forward(self.module, *args, **kwargs)
        attention = sequence_attention()
        return run_checkpointed(_recomputed, attention, forward, self.module, *args, use_reentrant=False, **kwargs)

    def __reduce__(self) -> tuple[type[_Checkpointed], tuple[nn.Module]]:
        return _Checkpointed, (self.module,)


def _recomputed(attention: SequenceAttention | None, forward: Any, module: nn.Module, *args: Any, **kwargs: Any) -> Any:
    with implicit_replication(), attend_sequences_by(attention):
        return forward(module, *args, **kwargs)
