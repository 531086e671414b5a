"""Operators on a rank outside the mesh: nothing is computed, and the program goes on.

All ranks run one program, but a mesh may have only some of them. On the others a DTensor of that mesh has an empty
local tensor. An operator gives empty tensors there, laid out as on the ranks of the mesh, of the dtype they have there,
and with a gradient (an empty one) where they have one: so a whole training step, backward and optimizer included, runs.
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
    """What is known of a result without computing it."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device
    grad: bool


def run_outside(layouts: Sequence[Layout], *, inplace: bool, view: bool, draws: bool) -> Local:
    """Return the local call of a plan for a rank outside the mesh."""
    known: Any = None

    def local(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        nonlocal known
        if draws:
            next_key(layouts[0].mesh)  # the ranks of the mesh take one: all ranks go on with the same numbers
        inputs = flatten_call(func, args, kwargs).tensors
        if inplace:
            return _write(inputs)
        if known is None or torch._C._is_any_autocast_enabled():
            known = _kinds(func, args, kwargs)
        kinds, structure = known
        return pytree.tree_unflatten(_results(inputs, kinds, view), structure)

    return local


def call_outside(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    """Return the result of an operator without a rule: replicated on the ranks of the mesh, empty on this one."""
    inputs = flatten_call(func, args, kwargs).tensors
    with no_torch_function():
        if canonical_name(func)[1]:
            return _write(inputs)
        kinds, structure = _kinds(func, args, kwargs)
        result = pytree.tree_unflatten(_results(inputs, kinds, view=False), structure)
    mesh = inputs[0]._layout.mesh
    layouts = [Layout(mesh, [REPLICATE] * mesh.ndim, kind.shape) for kind in kinds if isinstance(kind, ResultMeta)]
    return tag_results(result, layouts, ())


def _kinds(func: Any, args: Any, kwargs: dict[str, Any]) -> tuple[list[Any], Any]:
    """Return what the results are on the ranks of the mesh, by a call on tensors of the global shapes without values.

    Those are meta tensors. Under autocast, and where the device changes, they are fake tensors, which have a device.
    """
    cast = torch._C._is_any_autocast_enabled() or canonical_name(func)[0] in _TO_A_DEVICE

    def stand_in(tensor: Any) -> Tensor:
        device = tensor.device if cast else "meta"
        made = torch.empty_strided(tensor._layout.shape, global_stride(tensor), dtype=tensor.dtype, device=device)
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
            f"{name}: rank {comm.rank()} is outside the mesh, and what the result would be cannot be told without its "
            f"values ({error}). Run this on the ranks of the mesh only, or redistribute to a mesh of all ranks first"
        ) from error
    flat, structure = pytree.tree_flatten(result)
    here = flatten_call(func, args, kwargs).tensors[0].device
    kinds = [
        ResultMeta(tuple(v.shape), v.dtype, v.device if cast else here, v.requires_grad) if isinstance(v, Tensor) else v
        for v in flat
    ]
    return kinds, structure


def _fake_tensors() -> Any:
    from torch._subclasses.fake_tensor import FakeTensorMode  # slow to import, and needed on these ranks only

    return FakeTensorMode()


def _results(inputs: Sequence[DTensorBase], kinds: Sequence[Any], view: bool) -> list[Any]:
    tensors = [kind for kind in kinds if isinstance(kind, ResultMeta)]
    if view and all((kind.dtype, kind.device) == (inputs[0].dtype, inputs[0].device) for kind in tensors):
        seen = [Tensor.view(inputs[0], (0,) * max(1, len(kind.shape))) for kind in tensors]
        made = [each if kind.grad else each.detach() for each, kind in zip(seen, tensors, strict=True)]
    else:
        made = list(empty_results(tensors, inputs))
    each_made = iter(made)
    return [next(each_made) if isinstance(kind, ResultMeta) else kind for kind in kinds]


def empty_results(kinds: Sequence[ResultMeta], inputs: Sequence[Tensor]) -> tuple[Tensor, ...]:
    """Return empty tensors of these kinds, whose gradients are empty gradients of the inputs."""
    sources = [alias(tensor) for tensor in inputs if tensor.requires_grad]
    if sources and any(kind.grad for kind in kinds):
        return tuple(_Nothing.apply(kinds, *sources))  # type: ignore[no-untyped-call]  # torch's apply is untyped
    return tuple(map(_empty, kinds))


def _empty(kind: ResultMeta) -> Tensor:
    return torch.empty((0,) * max(1, len(kind.shape)), dtype=kind.dtype, device=kind.device)


class _Nothing(torch.autograd.Function):
    """An operator that is not computed here: empty results of empty inputs, and the same on the way back."""

    @staticmethod
    def forward(ctx: Any, kinds: Sequence[ResultMeta], *inputs: Tensor) -> tuple[Tensor, ...]:
        ctx.kinds = [ResultMeta(tuple(each.shape), each.dtype, each.device, True) for each in inputs]
        ctx.save_for_backward(*inputs)  # a gradient may depend on them: they are needed for its own gradient
        made = tuple(map(_empty, kinds))
        ctx.mark_non_differentiable(*(each for each, kind in zip(made, kinds, strict=True) if not kind.grad))
        return made

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Any, ...]:
        return None, *empty_results(ctx.kinds, [*(each for each in gradients if each is not None), *ctx.saved_tensors])


def _write(inputs: Sequence[DTensorBase]) -> DTensorBase:
    """Write nothing to the first tensor: what counts is that it was written to, and what its gradient depends on."""
    target = inputs[0]
    recorded = torch.is_grad_enabled() and any(tensor.requires_grad for tensor in inputs)
    kind = ResultMeta(target._layout.shape, target.dtype, target.device, recorded)
    Tensor.copy_(target, empty_results([kind], inputs)[0])
    return target
