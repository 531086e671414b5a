"""The fallback for operators without a rule: replicate the inputs, compute, and return a replicated result."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from shardwright.layout import Layout
from shardwright.tensor.base import policy
from shardwright.tensor.base.copied import is_copied, mark_copied, refuse_copied
from shardwright.tensor.base.gradient_types import REPLICATE
from shardwright.tensor.base.registry import canonical_name, overloads_of
from shardwright.tensor.base.tagging import DTensorBase, no_torch_function, tag_results, version_of
from shardwright.tensor.base.writes import WATCH, count_write
from shardwright.tensor.dispatch.arguments import flatten_call, map_tensors, tensors_in
from shardwright.tensor.dispatch.outside import call_outside, is_outside
from shardwright.tensor.dispatch.write_through import refuse_unwritable
from shardwright.tensor.random.local import same_draws
from shardwright.tensor.redistribute.autograd import redistribute_local

__all__ = ["call_replicated"]

# Arguments that are written to although neither the schema nor a version counter shows it.
_UNDECLARED_WRITES = {"batch_norm": (1, 2), "instance_norm": (1, 2)}


def call_replicated(name: str, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    """Call the function on replicated tensors, the same on every rank, and write its writes back to the arguments."""
    call = flatten_call(func, args, kwargs)
    mesh = call.tensors[0]._layout.mesh
    if is_outside(call.tensors[0]):
        with same_draws(name, func, mesh):
            return call_outside(func, args, kwargs)
    targets = [Layout(mesh, [REPLICATE] * mesh.ndim, tensor._layout.shape) for tensor in call.tensors]
    policy.check(name, [(tensor._layout, target) for tensor, target in zip(call.tensors, targets, strict=True)])
    with no_torch_function():
        replicated = [
            redistribute_local(tensor, tensor._layout, target)
            for tensor, target in zip(call.tensors, targets, strict=True)
        ]
        # Clone copies that look like views, so that a write to one raises before it happens.
        replicated = [moved.clone() if is_copied(moved) else moved for moved in replicated]
        if "::" in name:
            replicated = [tensor.view_as(tensor) for tensor in replicated]  # it may save them for its backward
        versions = [version_of(tensor) for tensor in replicated]
        remaining = iter(replicated)
        plain_args, plain_kwargs = map_tensors(args, kwargs, lambda _: next(remaining))
        with same_draws(name, func, mesh):
            result = func(*plain_args, **plain_kwargs)
        declared = _declared_writes(name, func, args, kwargs)
        written = []
        for tensor, moved, version, target in zip(call.tensors, replicated, versions, targets, strict=True):
            first_in_place = moved is replicated[0] and canonical_name(func)[1]
            if version_of(moved) != version or first_in_place or any(tensor is other for other in declared):
                if WATCH.inference:
                    count_write(tensor)
                refuse_copied(name, tensor)
                if moved is not tensor:
                    records = torch.is_grad_enabled() and (tensor.requires_grad or moved.requires_grad)
                    refuse_unwritable(name, tensor, records)
                    written.append((tensor, moved, target))
        for tensor, moved, target in written:  # all checks passed
            tensor.copy_(redistribute_local(moved, target, tensor._layout))
    returned = {id(moved): tensor for moved, tensor in zip(replicated, call.tensors, strict=True)}
    tagged = _tag(result, mesh, returned)
    for tensor, moved in zip(call.tensors, replicated, strict=True):
        if moved is not tensor and tagged is not tensor:
            mark_copied(tagged, name, tensor, sharing=moved)
    return tagged


def _declared_writes(name: str, func: Any, args: Any, kwargs: dict[str, Any]) -> list[Tensor]:
    """Return the tensor arguments whose writes the version counters miss.

    Inference tensors have no version counter: for them, the schemas of the operator say which arguments it writes to.
    """
    written = [args[i] for i in _UNDECLARED_WRITES.get(name, ()) if i < len(args)]
    if torch.is_inference_mode_enabled():
        for overload in overloads_of(func):
            arguments = overload._schema.arguments
            given = dict(zip((a.name for a in arguments if not a.kwarg_only), args, strict=False)) | kwargs
            written += (given.get(a.name) for a in arguments if a.alias_info is not None and a.alias_info.is_write)
    return list(tensors_in(written))


def _tag(result: Any, mesh: Any, returned: dict[int, DTensorBase]) -> Any:
    """Tag results as replicated; if the call returned an argument (in place, `out=`), return that argument itself."""
    if isinstance(result, Tensor) and id(result) in returned:
        return returned[id(result)]
    layouts: list[Layout] = []

    def count(value: Any) -> None:
        if isinstance(value, Tensor):
            layouts.append(Layout(mesh, [REPLICATE] * mesh.ndim, torch.Size(value.shape)))
        elif isinstance(value, list | tuple):
            for item in value:
                count(item)

    with no_torch_function():
        count(result)
    return tag_results(result, layouts, returned.values())
