"""Run a parallel model: check what goes in, and gather parameters in units.

The hooks of a parallel model are methods of one object, which is copied and pickled with the model. Units refer to
parameters, and these are replaced by `to_empty`, `to` and `load_state_dict(assign=True)`: so every forward of the model
checks that each parameter belongs to its unit, and makes the units again if not.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, final

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from shardwright.errors import MeshMismatchError, MixedTensorsError, TensorError
from shardwright.parallel.plan.mesh_roles import MeshRoles
from shardwright.parallel.plan.select import UnitGroup
from shardwright.parallel.units import MixedPrecisionPolicy, Schedule, Unit, unit_of
from shardwright.parallel.units.reduction import needs_gradient_now
from shardwright.parallel.units.schedule import in_backward
from shardwright.tensor import DTensor
from shardwright.tensor.base.policy import replicates_implicitly
from shardwright.tensor.gradients.enter import call_after_deferral, is_deferring

__all__ = ["RunningModel", "running_model"]

_GROUP = "_unit_group"  # an attribute of parameters: the index of their group


def running_model(model: nn.Module) -> RunningModel | None:
    """Return what the hooks of a parallel model have in common; None if it was not parallelized."""
    for hook in model._forward_pre_hooks.values():
        owner = getattr(hook, "__self__", None)
        if isinstance(owner, RunningModel):
            return owner
    return None


@final
class RunningModel:
    """What the hooks of a parallel model need: its mesh, its precision, and which parameters form a unit.

    `groups` are the parameters of each unit, the one of the model itself first.
    """

    def __init__(
        self,
        roles: MeshRoles,
        groups: tuple[UnitGroup, ...],
        precision: MixedPrecisionPolicy | None,
        reshard_after_forward: bool,
    ) -> None:
        self.roles, self.groups = roles, groups
        self._group_of = {name: index for index, group in enumerate(groups) for name in group.names}
        self.precision, self.reshard_after_forward = precision, reshard_after_forward
        self._schedule = Schedule()
        self._units: list[Unit | None] | None = None  # one for each group that has parameters
        self._deferring = False

    def install(self, model: nn.Module) -> None:
        """Register the hooks of the model, and record the group of each parameter in it."""
        for name, parameter in model.named_parameters():
            if name in self._group_of:
                parameter.__dict__[_GROUP] = self._group_of[name]
        model.register_forward_pre_hook(self.before, prepend=True, with_kwargs=True)
        model.register_forward_hook(self.after, always_call=True)

    def __getstate__(self) -> dict[str, Any]:
        return {
            **self.__dict__,
            "_units": None,
            "_schedule": Schedule(),
            "_deferring": False,
        }  # a copy makes units of its own

    # --- hooks ------------------------------------------------------------------------------------------------------

    def before(
        self, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
        """Check the inputs and bind the units; cast the inputs if the precision says so."""
        self._check_inputs(model, args, kwargs)
        parameters = dict(model.named_parameters())
        self._refuse_meta(model, parameters, args, kwargs)
        self.bind(parameters)
        self._defer_reduction()
        if not self._schedule.running and not in_backward():  # a checkpoint, or a hook, may call the model in backward
            self._schedule.begin_forward()
        self._schedule.running += 1
        dtype = None if self.precision is None else self.precision.param_dtype
        if self.precision is None or dtype is None or not self.precision.cast_forward_inputs:
            return None
        cast: tuple[tuple[Any, ...], dict[str, Any]] = _cast((args, kwargs), dtype)
        return cast

    def after(self, _: nn.Module, __: Any, output: Any) -> Any:
        """End an evaluation, whose units are not needed for a backward pass; cast the outputs."""
        if not self._schedule.running:
            return None  # the hook before has raised
        self._schedule.running -= 1
        outermost = not self._schedule.running and not in_backward()
        if output is None:  # the forward has raised, or returns nothing
            if outermost:
                self._schedule.abandon()
            return None
        if outermost and not torch.is_grad_enabled():
            self._schedule.finish(evaluated=True)
        dtype = None if self.precision is None else self.precision.output_dtype
        return None if dtype is None else _cast(output, dtype)

    @property
    def units(self) -> list[Unit]:
        """The units of the last forward, that of the model itself first."""
        return [unit for unit in self._units or () if unit is not None]

    # --- inputs -----------------------------------------------------------------------------------------------------

    def _check_inputs(self, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        for name, value in _named(args, kwargs):
            if isinstance(value, DTensor) and value.sharding.mesh is not self.roles.mesh:
                raise MeshMismatchError(
                    f"{type(model).__name__}: {name} is on {value.sharding.mesh!r}, but the model on "
                    f"{self.roles.mesh!r}: use sw.shard_batch(batch, mesh) with the mesh of the model"
                )
            plain = isinstance(value, Tensor) and not isinstance(value, DTensor) and value.ndim > 0
            if plain and not replicates_implicitly():
                raise MixedTensorsError(
                    f"{type(model).__name__}: {name} is a plain tensor of shape {tuple(value.shape)}, which may differ "
                    "between ranks: pass the batch through sw.shard_batch(batch, mesh), or use `with "
                    "sw.implicit_replication():` if every rank holds the same values"
                )

    def _refuse_meta(
        self, model: nn.Module, parameters: Mapping[str, Tensor], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> None:
        name = next((name for name, parameter in parameters.items() if parameter.is_meta), None)
        if name is None or any(isinstance(value, Tensor) and value.is_meta for _, value in _named(args, kwargs)):
            return
        raise TensorError(
            f"{type(model).__name__}: parameter {name} is on the meta device, without values: call "
            "model.to_empty(device=...) and initialize the model, or load a checkpoint, before its first use"
        )

    # --- units ------------------------------------------------------------------------------------------------------

    def bind(self, parameters: Mapping[str, Tensor]) -> None:
        """Make units of the model's parameters, if they are not those of the last forward."""
        found = self._grouped(parameters)
        if self._units is not None and _are_same(found, self._units):
            return
        self._end_deferral(completed=True)  # of the units so far, whose parameters keep their gradients
        for unit in self._units or ():
            if unit is not None:
                unit.release()
        self._schedule, self._units = Schedule(), []
        for group, (_, mesh_dims) in zip(found, self.groups, strict=True):
            unit = self._unit(list(group.values()), list(group), mesh_dims) if group else None
            self._units.append(unit)

    def _defer_reduction(self) -> None:
        """Let units accumulate gradients while their reduction is deferred, unless hooks are to get them at once."""
        if not is_deferring() or self._deferring:
            return
        self._deferring = True
        call_after_deferral(self._end_deferral)
        for unit in self._units or ():
            if unit is not None:
                unit.reduces = needs_gradient_now(unit.parameters)

    def _end_deferral(self, completed: bool) -> None:
        self._deferring = False
        for unit in self._units or ():
            if unit is not None:
                unit.reduces = True
                if completed:
                    unit.flush()
                else:
                    unit.discard_gradients()

    def _grouped(self, parameters: Mapping[str, Tensor]) -> list[dict[str, Tensor]]:
        """Return the parameters of each group by name.

        A parameter that has another name now, because an adapter wraps its layer, stays in its group. A plain one that
        replaced it belongs to none, and counts as replicated.
        """
        groups: list[dict[str, Tensor]] = [{} for _ in self.groups]
        for name, parameter in parameters.items():
            index = self._group_of.get(name, parameter.__dict__.get(_GROUP))
            if index is not None and isinstance(parameter, DTensor):
                groups[index][name] = parameter
        return groups

    def _unit(self, parameters: list[Tensor], names: list[str], mesh_dims: tuple[int, ...]) -> Unit:
        unit = unit_of(
            parameters,
            mesh_dims,
            replicated=self.roles.replicated,
            precision=self.precision,
            reshard_after_forward=self.reshard_after_forward,
            schedule=self._schedule,
            parent=self._units[0] if self._units else None,
            names=names,
        )
        for index, parameter in enumerate(parameters):
            parameter.__dict__["_unit"] = unit, index
        return unit


def _are_same(found: list[dict[str, Tensor]], units: list[Unit | None]) -> bool:
    """Return whether the units have these parameters."""
    return all(
        len(group) == (0 if unit is None else len(unit.parameters))
        and all(a is b for a, b in zip(group.values(), () if unit is None else unit.parameters, strict=True))
        for group, unit in zip(found, units, strict=True)
    )


def _named(args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[tuple[str, Any]]:
    positional = [(f"argument {index}", value) for index, value in enumerate(args)]
    return positional + [(f"argument {name!r}", value) for name, value in kwargs.items()]


def _cast(value: Any, dtype: torch.dtype) -> Any:
    """Return the value with its floating-point tensors in `dtype`."""

    def cast(tensor: Tensor) -> Tensor:
        return tensor.to(dtype) if tensor.is_floating_point() else tensor

    return pytree.tree_map_only(Tensor, cast, value)
