"""Operators on a rank outside the mesh: they compute nothing, and return empty tensors.

All ranks run the same program, but a mesh may contain only some of them. On the others a DTensor of that mesh has an
empty local tensor. An operator returns empty tensors there, with the layout, dtype and requires_grad that they have on
the ranks of the mesh, so that a training step, with backward and optimizer, runs on all ranks.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from shardwright import comm
from shardwright.errors import UnsupportedError
from shardwright.layout import Layout
from shardwright.tensor.base.gradient_types import REPLICATE
from shardwright.tensor.base.registry import canonical_name
from shardwright.tensor.base.strategy import Local
from shardwright.tensor.base.strides import global_stride
from shardwright.tensor.base.tagging import DTensorBase, alias, no_torch_function, tag_results
from shardwright.tensor.dispatch.arguments import flatten_call, map_tensors
from shardwright.tensor.random.local import next_key

__all__ = ["ResultMeta", "call_outside", "empty_results", "is_outside", "run_outside"]


def is_outside(tensor: DTensorBase) -> bool:
    """Return whether this process is not in the tensor's mesh."""
    return comm.rank() not in tensor._layout.mesh


_TO_A_DEVICE = frozenset(("to", "cpu", "cuda", "type", "type_as"))


class ResultMeta(NamedTuple):
    """The metadata of a result that is not computed."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device
    grad: bool


def run_outside(
    layouts: Sequence[Layout],
    *,
    inplace: bool,
    view: bool,
    draws: bool,
    casts: Sequence[torch.dtype | None] | None = None,
) -> Local:
    """Return the local call of a plan for a rank outside the mesh; `casts` are the dtypes its operands are cast to."""
    known: Any = None

    def local(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        nonlocal known
        if draws:
            next_key(layouts[0].mesh)  # the ranks of the mesh take one: keep the offsets the same on all ranks
        inputs = flatten_call(func, args, kwargs).tensors
        if inplace:
            return _write(inputs)
        if known is None or torch._C._is_any_autocast_enabled():
            known = _result_metas(func, args, kwargs, casts)
        metas, structure = known
        return pytree.tree_unflatten(_results(inputs, metas, view), structure)

    return local


def call_outside(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    """Return the result of an operator without a rule: replicated on the ranks of the mesh, empty on this rank."""
    inputs = flatten_call(func, args, kwargs).tensors
    with no_torch_function():
        if canonical_name(func)[1]:
            return _write(inputs)
        metas, structure = _result_metas(func, args, kwargs)
        result = pytree.tree_unflatten(_results(inputs, metas, view=False), structure)
    mesh = inputs[0]._layout.mesh
    layouts = [Layout(mesh, [REPLICATE] * mesh.ndim, meta.shape) for meta in metas if isinstance(meta, ResultMeta)]
    return tag_results(result, layouts, ())


def _result_metas(
    func: Any, args: Any, kwargs: dict[str, Any], casts: Sequence[torch.dtype | None] | None = None
) -> tuple[list[Any], Any]:
    """Return the metadata of the results, by a call on tensors of the global shapes without values.

    These are meta tensors; under autocast, and if the device may change, fake tensors, which have a device.
    """
    dtypes = iter(casts or ())
    cast = torch._C._is_any_autocast_enabled() or canonical_name(func)[0] in _TO_A_DEVICE

    def stand_in(tensor: Any) -> Tensor:
        device = tensor.device if cast else "meta"
        dtype = next(dtypes, None) or tensor.dtype
        made = torch.empty_strided(tensor._layout.shape, global_stride(tensor), dtype=dtype, device=device)
        return made.requires_grad_(tensor.requires_grad)

    try:
        with _fake_tensors() if cast else nullcontext():
            given, named = map_tensors(args, kwargs, stand_in)
            if not cast:
                named = {k: "meta" if k == "device" and v is not None else v for k, v in named.items()}
            result = func(*given, **named)
    except (RuntimeError, NotImplementedError) as error:
        name = canonical_name(func)[0]
        raise UnsupportedError(
            f"{name}: rank {comm.rank()} is outside the mesh, and the shape of the result depends on the values "
            f"({error}). Run this on the ranks of the mesh only, or redistribute to a mesh of all ranks first"
        ) from error
    flat, structure = pytree.tree_flatten(result)
    here = flatten_call(func, args, kwargs).tensors[0].device
    metas = [
        ResultMeta(tuple(v.shape), v.dtype, v.device if cast else here, v.requires_grad) if isinstance(v, Tensor) else v
        for v in flat
    ]
    return metas, structure


def _fake_tensors() -> Any:
    from torch._subclasses.fake_tensor import FakeTensorMode  # slow to import, and needed on these ranks only

    return FakeTensorMode()


def _results(inputs: Sequence[DTensorBase], metas: Sequence[Any], view: bool) -> list[Any]:
    tensors = [meta for meta in metas if isinstance(meta, ResultMeta)]
    if view and all((meta.dtype, meta.device) == (inputs[0].dtype, inputs[0].device) for meta in tensors):
        views = [Tensor.view(inputs[0], (0,) * max(1, len(meta.shape))) for meta in tensors]
        made = [view if meta.grad else view.detach() for view, meta in zip(views, tensors, strict=True)]
    else:
        made = list(empty_results(tensors, inputs))
    remaining = iter(made)
    return [next(remaining) if isinstance(meta, ResultMeta) else meta for meta in metas]


def empty_results(metas: Sequence[ResultMeta], inputs: Sequence[Tensor]) -> tuple[Tensor, ...]:
    """Return empty tensors with this metadata, connected to the inputs by empty gradients."""
    sources = [alias(tensor) for tensor in inputs if tensor.requires_grad]
    if sources and any(meta.grad for meta in metas):
        return tuple(_EmptyResults.apply(metas, *sources))  # type: ignore[no-untyped-call]  # torch's apply is untyped
    return tuple(map(_empty, metas))


def _empty(meta: ResultMeta) -> Tensor:
    return torch.empty((0,) * max(1, len(meta.shape)), dtype=meta.dtype, device=meta.device)


class _EmptyResults(torch.autograd.Function):
    """An operator that is not computed on this rank: empty results in forward, empty gradients in backward."""

    @staticmethod
    def forward(ctx: Any, metas: Sequence[ResultMeta], *inputs: Tensor) -> tuple[Tensor, ...]:
        ctx.metas = [ResultMeta(tuple(x.shape), x.dtype, x.device, True) for x in inputs]
        ctx.save_for_backward(*inputs)  # needed for gradients of the second order
        made = tuple(map(_empty, metas))
        ctx.mark_non_differentiable(*(x for x, meta in zip(made, metas, strict=True) if not meta.grad))
        return made

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Any, ...]:
        return None, *empty_results(ctx.metas, [*(x for x in gradients if x is not None), *ctx.saved_tensors])


def _write(inputs: Sequence[DTensorBase]) -> DTensorBase:
    """Write an empty tensor to the first one, for its version counter and its autograd history."""
    target = inputs[0]
    recorded = torch.is_grad_enabled() and any(tensor.requires_grad for tensor in inputs)
    meta = ResultMeta(target._layout.shape, target.dtype, target.device, recorded)
    Tensor.copy_(target, empty_results([meta], inputs)[0])
    return target
