"""Read 0-dimensional tensors that are given where torch takes a number.

torch accepts a 0-dimensional tensor for a number (`F.leaky_relu(x, slope)`, `x.view(n, 3)`, `torch.bincount(x,
minlength=n)`) and reads its value. A rule needs the value as well, to plan the call, and a partial value must be summed
before it is read. Which arguments are numbers follows from torch's schemas and, for functions written in Python, from
their annotations.
"""

from __future__ import annotations

import types
from collections.abc import Sequence
from functools import lru_cache
from inspect import Parameter, signature
from typing import Any, Union, get_args, get_origin

import torch
from torch import Tensor

from shardwright.errors import TensorError
from shardwright.tensor.base.tagging import DTensorBase

__all__ = ["read_numbers"]

_NUMBERS = frozenset((int, float, complex))
_BESIDE_NUMBERS = _NUMBERS | {str, bool, type(None)}
_NUMBER_TYPES = ("number", "float", "int", "complex", "SymInt")


def read_numbers(name: str, func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
    """Return the arguments, with a number for each 0-dimensional tensor that is given where torch takes a number.

    Raise TensorError if such a tensor requires grad: its gradient would be lost.
    """
    if not (any(map(_holds_scalar, args[1:])) or any(map(_holds_scalar, kwargs.values()))):
        return args, kwargs
    schemas = _schemas(name) if not name.startswith("__") else ()
    names = _parameters(func)
    given = dict(zip(names, args, strict=False)) if names else dict(enumerate(args))
    schemas = [schema for schema in schemas if _accepts(schema, {**given, **kwargs})] or schemas

    def visit(position: int | str, value: Any) -> Any:
        if not _holds_scalar(value) or not _is_number(func, schemas, position):
            return value
        if isinstance(value, Tensor):
            return _value_of(name, position, value)
        return type(value)(_value_of(name, position, item) if _holds_scalar(item) else item for item in value)

    read = (visit(names[i] if i < len(names) else i, value) if i else value for i, value in enumerate(args))
    return tuple(read), {key: visit(key, value) for key, value in kwargs.items()}


def _holds_scalar(value: Any) -> bool:
    """Return whether a value is a 0-dimensional tensor, or a list with one in it."""
    if isinstance(value, Tensor):
        return value.dim() == 0
    return type(value) in (list, tuple) and any(isinstance(item, Tensor) and item.dim() == 0 for item in value)


def _value_of(name: str, position: int | str, tensor: Tensor) -> Any:
    if tensor.requires_grad:
        shown = f" {tensor._layout}" if isinstance(tensor, DTensorBase) else ""
        raise TensorError(
            f"{name}: argument {position!r} is a tensor{shown} that requires grad, where torch takes a number, through "
            "which no gradient flows: use `x.detach()`, or an operator that takes a tensor there"
        )
    if tensor.is_floating_point() or tensor.is_complex():
        return tensor.item()
    return bool(tensor) if tensor.dtype is torch.bool else int(tensor)  # raises outside the mesh, where item() is nan


@lru_cache(maxsize=1024)
def _schemas(name: str) -> list[Any]:
    """Return the schemas of the overloads of torch's operator of this name that take a tensor first."""
    packet: Any = getattr(torch.ops.aten, name, None)
    overloads = packet.overloads() if hasattr(packet, "overloads") else ()
    schemas = [getattr(packet, overload)._schema for overload in overloads]
    return [schema for schema in schemas if schema.arguments and str(schema.arguments[0].type) == "Tensor"]


@lru_cache(maxsize=1024)
def _parameters(func: Any) -> tuple[str, ...]:
    """Return the parameter names of a function written in Python; none if it takes `*args`."""
    if not isinstance(func, types.FunctionType):
        return ()
    parameters = signature(func).parameters.values()
    if any(parameter.kind is Parameter.VAR_POSITIONAL for parameter in parameters):
        return ()
    return tuple(parameter.name for parameter in parameters)


def _type_at(schema: Any, position: int | str) -> str | None:
    """Return the type that a schema has at a position or name, or None if it has no such argument."""
    if isinstance(position, str):
        return next((str(argument.type) for argument in schema.arguments if argument.name == position), None)
    positional = [argument for argument in schema.arguments if not argument.kwarg_only]
    if position < len(positional):
        return str(positional[position].type)
    last = str(positional[-1].type)
    return last if last.startswith("List[") else None  # x.view(2, n)


def _accepts(schema: Any, given: dict[Any, Any]) -> bool:
    """Return whether a schema takes no tensor where a Python number is given: `clamp(x, 0, high)` takes numbers."""
    return not any(
        type(value) in _NUMBERS and "Tensor" in (_type_at(schema, position) or "") for position, value in given.items()
    )


def _is_number(func: Any, schemas: Sequence[Any], position: int | str) -> bool:
    """Return whether torch takes only a number or a list of numbers at a position or name, not a tensor."""
    annotated = _annotation(func, position) if isinstance(position, str) else None
    if annotated is not None:
        return annotated
    known = [kind for schema in schemas if (kind := _type_at(schema, position)) is not None]
    return bool(known) and all(_is_number_type(kind) for kind in known)


def _is_number_type(kind: str) -> bool:
    for wrapper in ("Optional[", "List["):
        kind = kind[len(wrapper) : -1] if kind.startswith(wrapper) else kind
    return kind in _NUMBER_TYPES


@lru_cache(maxsize=1024)
def _annotation(func: Any, name: str) -> bool | None:
    """Return whether a Python function's annotation says that a parameter is a number; None if it says nothing."""
    annotation = getattr(func, "__annotations__", {}).get(name)
    if annotation is None or isinstance(annotation, str):
        return None
    members = get_args(annotation) if get_origin(annotation) in (Union, types.UnionType) else (annotation,)
    members = tuple(
        item for member in members for item in (get_args(member) if get_origin(member) is list else (member,))
    )
    return set(members) <= _BESIDE_NUMBERS and bool(_NUMBERS & set(members))
