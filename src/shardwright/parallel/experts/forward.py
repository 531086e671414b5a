"""The forward of experts on DTensors: tokens sharded over data dimensions, experts over `ep`."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

from torch import Tensor, nn

from shardwright import comm
from shardwright.errors import UnsupportedError
from shardwright.layout import Layout, Mesh, Placement, Replicate, Shard
from shardwright.parallel.experts.products import compute_experts
from shardwright.parallel.experts.route import route
from shardwright.parallel.plan.mesh_roles import EXPERTS, TENSOR
from shardwright.tensor.base.capture import is_capturing
from shardwright.tensor.base.copied import refuse_stale
from shardwright.tensor.base.gradient_types import ENTERED
from shardwright.tensor.base.parameter_use import parameter_use
from shardwright.tensor.base.tagging import DTensorBase, alias, no_torch_function, tag
from shardwright.tensor.gradients.below_autograd import expect_plain_roots
from shardwright.tensor.gradients.enter import prepare_cast_operand, prepare_operand
from shardwright.tensor.gradients.gather_together import saving_by_unit
from shardwright.tensor.redistribute.autograd import redistribute_local

__all__ = ["expert_parameters", "experts_forward"]


def expert_parameters(module: nn.Module) -> dict[str, Any]:
    """Return the parameters of a module of experts: each has one entry for each expert."""
    return dict(module.named_parameters(recurse=False))


def experts_forward(module: nn.Module, tokens: Any, chosen: Any, weights: Any) -> Any:
    """Return the weighted sum of the chosen experts' results; what transformers registers as an implementation."""
    if not isinstance(tokens, DTensorBase) or EXPERTS not in (tokens._layout.mesh.names or ()):
        from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

        return ALL_EXPERTS_FUNCTIONS["grouped_mm"](module, tokens, chosen, weights)
    if tokens.is_meta or is_capturing():
        raise UnsupportedError(
            f"{type(module).__name__}: how many tokens go to which rank depends on values, which tensors on the meta "
            "device do not have, and sw.compile does not see: predict the step on a mesh without ep, and compile other "
            "parts of the model"
        )
    mesh = tokens._layout.mesh
    for each in (tokens, chosen, weights):
        refuse_stale("experts", each)
    layout = _token_layout(tokens._layout, mesh)
    over = (mesh.names or ()).index(EXPERTS)
    parameters = expert_parameters(module)
    saving: AbstractContextManager[None] = nullcontext()
    with no_torch_function():
        rows, index, factors = (_local(each, layout) for each in (tokens, chosen, weights))
        local = {}
        for name, parameter in parameters.items():
            local[name] = _parameter(parameter, layout)
            saving = saving_by_unit(parameter) or saving
        first: Layout = next(iter(parameters.values()))._layout
        experts = [_experts_of(first, peer) for peer in sorted(mesh.peers(comm.rank(), over))]
        compute = partial(compute_experts, module, local)
        with saving:
            out = route(rows, index, factors, experts, compute, comm.group_along(mesh, over))
        return tag(alias(out) if out.grad_fn is None else out, layout)


def _token_layout(layout: Layout, mesh: Mesh) -> Layout:
    """Return the layout of tokens: sharded over all data dimensions, as they are where they are."""
    placements: list[Placement] = []
    for name, placement in zip(mesh.names or (), layout.placements, strict=True):
        rest: Placement = Replicate() if name == TENSOR else Shard(0)
        placements.append(placement if placement.is_shard(0) else rest)
    order = sorted(layout.order, key=lambda mesh_dim: not layout.placements[mesh_dim].is_shard(0))
    return Layout(mesh, placements, layout.shape, order)


def _local(tensor: DTensorBase, rows: Layout) -> Tensor:
    expect_plain_roots()
    source = tensor._layout
    moved = redistribute_local(tensor, source, Layout(source.mesh, rows.placements, source.shape, rows.order))
    return moved.view_as(moved) if moved is tensor else moved


def _parameter(parameter: DTensorBase, tokens: Layout) -> Tensor:
    """Return this rank's experts, gathered over the mesh dimensions over which they are sharded for storage."""
    source = parameter._layout
    mesh = source.mesh
    placements: list[Placement] = []
    for name, own, of_tokens in zip(mesh.names or (), source.placements, tokens.placements, strict=True):
        placements.append(own if name == EXPERTS else Replicate() if of_tokens.is_replicate() else ENTERED)
    target = source.replace(placements=placements, order=source.order)
    use = parameter_use(parameter)
    if use is not None and use.dtype is not None:
        return prepare_cast_operand(parameter, source, target, use.dtype)
    prepared = prepare_operand(parameter, source, target)
    return prepared.view_as(prepared) if prepared is parameter else prepared


def _experts_of(layout: Layout, rank: int) -> range:
    """Return the experts of a rank: those of all ranks that differ from it along other mesh dimensions."""
    placements = [
        own if name == EXPERTS else Replicate()
        for name, own in zip(layout.mesh.names or (), layout.placements, strict=True)
    ]
    region = layout.replace(placements=placements, order=layout.order).region(rank)
    return range(region.offset[0], region.offset[0] + region.size[0])
