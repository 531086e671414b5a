"""Find the experts of a model, decide how they are parallel, and install it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import nn

from shardwright.errors import ArgumentTypeError, PlanError
from shardwright.parallel.experts.forward import expert_parameters, experts_forward
from shardwright.parallel.experts.style import ExpertParallel
from shardwright.parallel.plan.mesh_roles import MeshRoles
from shardwright.parallel.plan.transformers_model import is_transformers_model, own_configuration

__all__ = ["ExpertInstallation", "decide_experts"]

NAME = "shardwright"


@dataclass(frozen=True, slots=True)
class ExpertInstallation:
    """The modules of experts of a model, decided before anything is changed."""

    modules: tuple[str, ...]
    parameters: frozenset[str]

    def __str__(self) -> str:
        return f"experts {' '.join(self.modules)}"

    def install(self, model: Any) -> None:
        """Register the implementation with `transformers`, and let the model use it."""
        from transformers.integrations.moe import ExpertsInterface

        ExpertsInterface.register(NAME, experts_forward)
        own_configuration(model)
        for name in self.modules:
            model.get_submodule(name).config._experts_implementation_internal = NAME


def decide_experts(model: nn.Module, style: ExpertParallel | None, roles: MeshRoles) -> ExpertInstallation | None:
    """Return how the experts of a model are computed over `ep`; None without such a mesh dimension."""
    if style is not None and not isinstance(style, ExpertParallel):
        raise ArgumentTypeError(f"parallelize: experts must be an ExpertParallel, got {type(style).__name__}")
    if roles.experts is None:
        if style is not None:
            raise PlanError(
                f"parallelize: experts={style!r}, but {roles.mesh!r} has no dimension named 'ep' over which experts "
                "are distributed: add one, or leave experts out"
            )
        return None
    found = {name: module for name, module in model.named_modules() if _is_experts(module)}
    if not is_transformers_model(model) or not found:
        raise PlanError(
            f"parallelize: {roles.mesh!r} has a dimension 'ep' for experts, but {type(model).__name__} has no experts "
            "that transformers' registry of implementations knows (ExpertsInterface): use 'dp' for data parallelism"
        )
    for name, module in found.items():
        if getattr(module, "has_post_expert_norm", False):
            raise PlanError(f"parallelize: {name} normalizes the results of its experts, which ep does not support")
        sizes = {parameter.shape[:1] for parameter in expert_parameters(module).values()}
        if len(sizes) != 1:
            raise PlanError(f"parallelize: the parameters of {name} do not all have one entry for each expert: {sizes}")
    parameters = [f"{name}.{key}" for name, module in found.items() for key in expert_parameters(module)]
    return ExpertInstallation(tuple(found), frozenset(parameters))


def _is_experts(module: nn.Module) -> bool:
    """Return whether a module has the form of experts in transformers: packed, with an implementation to choose."""
    down = module._parameters.get("down_proj")
    has_form = hasattr(type(module), "_apply_gate") and hasattr(module, "is_transposed")
    return has_form and down is not None and down.ndim == 3
