"""Decide how a model's attention is context parallel, and install it."""

from __future__ import annotations

from dataclasses import dataclass

from torch import nn

from shardwright.errors import ArgumentTypeError, PlanError
from shardwright.parallel.context.attention import scaled_dot_product_attention_by
from shardwright.parallel.context.loss import use_context_loss
from shardwright.parallel.context.style import ContextParallel
from shardwright.parallel.context.transformers_models import check_model, use_context_attention
from shardwright.parallel.plan.mesh_roles import MeshRoles
from shardwright.parallel.plan.transformers_model import is_transformers_model
from shardwright.tensor.base.sequence_attention import SequenceAttention

__all__ = ["ContextInstallation", "decide_context"]


@dataclass(frozen=True, slots=True)
class ContextInstallation:
    """How a model's attention is computed, decided before anything is changed."""

    style: ContextParallel

    def install(self, model: nn.Module) -> SequenceAttention:
        """Change the attention and the loss of a model of transformers; return the attention for other models."""
        if is_transformers_model(model):
            use_context_attention(model, self.style.mode)
            use_context_loss(model)
        return scaled_dot_product_attention_by(self.style.mode)


def decide_context(model: nn.Module, style: ContextParallel | None, roles: MeshRoles) -> ContextInstallation | None:
    """Return how the attention of a model is computed over `cp`; None without such a mesh dimension."""
    if style is not None and not isinstance(style, ContextParallel):
        raise ArgumentTypeError(f"parallelize: context must be a ContextParallel, got {type(style).__name__}")
    if roles.context is None:
        if style is not None:
            raise PlanError(
                f"parallelize: context={style!r}, but {roles.mesh!r} has no dimension named 'cp' over which sequences "
                "are sharded: add one, or leave context out"
            )
        return None
    chosen = style or ContextParallel()
    if is_transformers_model(model):
        check_model(model, chosen.mode, roles.size(roles.context), roles.size(roles.tensor))
    return ContextInstallation(chosen)
