"""Flatten a call into its DTensors and a hashable key of the other arguments, and rebuild it with other tensors."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from shardwright import comm
from shardwright.errors import MeshMismatchError, MixedTensorsError
from shardwright.layout import Layout
from shardwright.tensor.base import divergence, policy, trace
from shardwright.tensor.base.gradient_types import REPLICATE
from shardwright.tensor.base.registry import takes_numbers_by_type
from shardwright.tensor.base.tagging import DTensorBase, alias, disabled, empty_outside_mesh, tag, tag_replicated
from shardwright.tensor.dispatch.decompose import made_by_torch
from shardwright.tensor.dispatch.refusals import refuse_functional

__all__ = ["Call", "admit_plain_tensors", "flatten_call", "map_tensors", "tensors_in"]

_dtype = Tensor.dtype.__get__  # type: ignore[attr-defined]  # a getset descriptor
_requires_grad = Tensor.requires_grad.__get__  # type: ignore[attr-defined]  # likewise


class Call(NamedTuple):
    """A call's DTensors in order of appearance, and the key of its plan (None: an argument is not hashable)."""

    tensors: list[DTensorBase]
    key: tuple[Any, ...] | None


def flatten_call(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Call:
    """Return the DTensors of a call, and its key: layouts by identity, static arguments by value, operands by type."""
    tensors: list[DTensorBase] = []
    key: list[Any] = [func, torch.is_grad_enabled(), torch._C._is_any_autocast_enabled()]
    numbers_by_type = takes_numbers_by_type(func)
    hashable = _walk(args, tensors, key, numbers_by_type)
    for name, value in kwargs.items():
        key.append(name)
        hashable = _walk((value,), tensors, key, numbers_by_type) and hashable
    return Call(tensors, tuple(key) if hashable else None)


def _walk(values: Sequence[Any], tensors: list[DTensorBase], key: list[Any], numbers_by_type: bool) -> bool:
    hashable = True
    for value in values:
        kind = type(value)
        if isinstance(value, DTensorBase):
            tensors.append(value)
            # Strategies depend on whether a gradient is required.
            grad = disabled(_requires_grad, (), (value,), {})
            attributes = value.__dict__
            use = attributes.get("_use")
            key += (value._layout, disabled(_dtype, (), (value,), {}), grad, "_is_param" in attributes)
            key += (None,) if use is None else (use.gathered, use.dtype)  # quicker to hash than the use
        elif kind in (list, tuple, torch.Size):
            key += (kind, len(value))
            hashable = _walk(value, tensors, key, numbers_by_type) and hashable
        elif kind is slice:
            key += (slice, value.start, value.stop, value.step)
        elif kind in (int, float, bool, complex):
            # With the type, because 1, 1.0 and True are equal keys.
            key += (kind,) if numbers_by_type else (kind, value)
        elif kind.__hash__ is None or isinstance(value, Tensor):
            hashable = False  # a plain tensor would be kept alive by the key
        else:
            key.append(value)
    return hashable


def tensors_in(values: Any) -> Iterator[Tensor]:
    """Yield the tensors in nested arguments, in order."""
    for value in values:
        if isinstance(value, Tensor):
            yield value
        elif type(value) in (list, tuple):
            yield from tensors_in(value)


def map_tensors(
    args: Sequence[Any], kwargs: dict[str, Any], change: Callable[[Tensor], Any]
) -> tuple[list[Any], dict[str, Any]]:
    """Return the arguments with every DTensor replaced, in the order of `flatten_call`."""

    def visit(value: Any) -> Any:
        if isinstance(value, DTensorBase):
            return change(value)
        if type(value) in (list, tuple):
            return type(value)(visit(item) for item in value)
        return value

    return [visit(value) for value in args], {name: visit(value) for name, value in kwargs.items()}


def _numbers_to_one_mesh(
    args: Sequence[Any], kwargs: dict[str, Any], tensors: Sequence[DTensorBase]
) -> tuple[Sequence[Any], dict[str, Any]] | None:
    """Return the arguments on one mesh if those on other meshes are replicated scalars that all its ranks hold."""
    mesh = next((tensor._layout.mesh for tensor in tensors if tensor._layout.shape), tensors[0]._layout.mesh)
    for tensor in tensors:
        own = tensor._layout
        number = not own.shape and own.is_replicated and not disabled(_requires_grad, (), (tensor,), {})
        if own.mesh is not mesh and not (number and set(mesh.ranks) <= set(own.mesh.ranks)):
            return None
    here = Layout(mesh, [REPLICATE] * mesh.ndim, ())

    def bring(tensor: Tensor) -> Any:
        if tensor._layout.mesh is mesh:  # type: ignore[attr-defined]  # only DTensors are mapped
            return tensor
        return tag(alias(tensor) if comm.rank() in mesh else empty_outside_mesh(tensor, here), here)

    return map_tensors(args, kwargs, bring)


def admit_plain_tensors(name: str, args: Sequence[Any], kwargs: dict[str, Any]) -> tuple[Sequence[Any], dict[str, Any]]:
    """Return the arguments with plain tensors made replicated DTensors if that is safe; raise MixedTensorsError if not.

    It is safe for 0-dimensional tensors that do not require grad, for tensors that torch's own code has made, and
    inside `implicit_replication`.
    """
    everything = [*tensors_in(args), *tensors_in(kwargs.values())]
    ours = [tensor for tensor in everything if isinstance(tensor, DTensorBase)]
    layouts = list(dict.fromkeys(tensor._layout for tensor in ours))
    meshes = list(dict.fromkeys(layout.mesh for layout in layouts))
    if len(meshes) > 1:
        brought = _numbers_to_one_mesh(args, kwargs, ours)
        if brought is not None:
            return admit_plain_tensors(name, *brought)
        first, second = meshes[:2]
        raise MeshMismatchError(
            f"{name}: arguments are on different meshes, {first!r} and {second!r}: bring them to one with "
            "`x.redistribute(mesh, placements)`"
        )
    if all(isinstance(tensor, DTensorBase) for tensor in everything):
        return args, kwargs
    beside = layouts[0]

    def visit(value: Any, where: str) -> Any:
        if isinstance(value, Tensor) and not isinstance(value, DTensorBase):
            refuse_functional(value, f"{name}: {where}")
            if (value.ndim == 0 and not value.requires_grad) or policy.replicates_implicitly() or made_by_torch():
                divergence.check_same_values(value, beside.mesh, f"{name}: {where}")
                return tag_replicated(alias(value), beside.mesh)
            raise MixedTensorsError(
                f"{name}: {where} is a plain tensor of shape {tuple(value.shape)} beside a DTensor {beside}: make it a "
                "DTensor with distribute_tensor(tensor, mesh, placements) or DTensor.from_local, or use "
                f"`with sw.implicit_replication():` if every rank holds the same values ({trace.source_location()})"
            )
        if type(value) in (list, tuple):
            return type(value)(visit(item, f"{where}[{index}]") for index, item in enumerate(value))
        return value

    admitted = tuple(visit(value, f"argument {index}") for index, value in enumerate(args))
    return admitted, {key: visit(value, f"argument {key!r}") for key, value in kwargs.items()}
