"""Compare DTensors with plain tensors, rank by rank, without side effects.

A rank compares its own part with the same region of the plain tensor, which it computed itself: no communication is
needed, unless a value is partial. Nothing is read through operators of DTensor, which may move data or renew copies.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from shardwright import comm
from shardwright.layout import Layout, Partial
from shardwright.tensor.base.tagging import DTensorBase, no_torch_function
from shardwright.testing.programs.draft.namespace import KEPT

__all__ = ["difference", "is_readable", "live_values", "local_part", "loosest", "metadata_difference", "region_of"]

# Tolerance as a fraction of the largest value: sums are computed in another order.
TOLERANCES = {torch.float64: 1e-9, torch.float32: 1e-5, torch.bfloat16: 0.06, torch.float16: 0.01}


def loosest(steps: Sequence[str]) -> float:
    """Return the tolerance of a program: that of the least precise dtype it names.

    >>> loosest(["a = leaf([1], (1,), torch.float64, [Shard(0)])", "b = a.to(torch.bfloat16)"])
    0.06
    """
    text = "\n".join(steps)
    named = [value for dtype, value in TOLERANCES.items() if str(dtype) in text]
    return max(named, default=1e-9)


def live_values(namespace: dict[str, Any], names: Sequence[str]) -> dict[str, Any]:
    """Return every value that a program holds: its variables, their gradients, parameters, what hooks have seen."""
    values: dict[str, Any] = {}
    for name in names:
        value = namespace[name]
        if isinstance(value, Tensor):
            values[name] = value
            if _may_have_gradient(value):
                values[f"{name}.grad"] = value.grad
        elif isinstance(value, nn.Module):
            for key, parameter in value.named_parameters():
                values[f"{name}.{key}"] = parameter
                values[f"{name}.{key}.grad"] = parameter.grad
        elif isinstance(value, bool | int | float):
            values[name] = value
    for name, gradients in namespace[KEPT].items():
        for number, gradient in enumerate(gradients):
            values[f"{KEPT}[{name!r}][{number}]"] = gradient
    return values


def is_readable(tensor: Tensor) -> bool:
    """Return whether torch lets us look at a tensor: not at one of several views after a write to its base."""
    try:
        with no_torch_function():
            return tensor.is_leaf or tensor.grad_fn is not None
    except RuntimeError:
        return False


def _may_have_gradient(tensor: Tensor) -> bool:
    with no_torch_function():
        return is_readable(tensor) and tensor.requires_grad and (tensor.is_leaf or tensor.retains_grad)


def local_part(tensor: DTensorBase) -> Tensor:
    """Return what this rank holds, as a plain tensor that shares its memory."""
    with no_torch_function(), torch.no_grad():
        return tensor.detach()


def region_of(plain: Tensor, layout: Layout) -> Tensor:
    """Return the part of a plain tensor that this rank holds under a layout."""
    return plain.detach()[layout.region(comm.rank()).slices()]


def metadata_difference(sharded: Any, plain: Any) -> str | None:
    """Return how shape, dtype, requires_grad or is_leaf differ; None if they are equal.

    Zeros are right where torch has no gradient, see docs/explanation/gradients.md.
    """
    if plain is None and isinstance(sharded, DTensorBase) and not local_part(sharded).any():
        return None
    if sharded is None or plain is None or not isinstance(plain, Tensor) or not isinstance(sharded, Tensor):
        if type(sharded) is type(plain) or (isinstance(sharded, int | float) and isinstance(plain, int | float)):
            return None
        return f"has type {type(sharded).__name__}, torch's has {type(plain).__name__}"
    if sharded.shape != plain.shape:
        return f"has shape {tuple(sharded.shape)}, torch's has {tuple(plain.shape)}"
    with no_torch_function():  # those of the local tensor, which are the same
        for attribute in ("dtype", "requires_grad", "is_leaf"):
            try:
                actual, expected = getattr(sharded, attribute), getattr(plain, attribute)
            except RuntimeError as error:
                return f"cannot tell its {attribute}: {error}"
            if actual != expected:
                return f"has {attribute} {actual}, torch's has {expected}"
    return None


def difference(actual: Any, expected: Any, tolerance: float, scale: float) -> str | None:
    """Return how two plain values differ; None if they are equal within the tolerance times the scale.

    >>> difference(torch.tensor([1.0]), torch.tensor([1.0 + 1e-7]), 1e-5, 1.0)
    >>> difference(torch.tensor([1, 2]), torch.tensor([1, 3]), 1e-5, 1.0)
    'is [1, 2], torch has [1, 3]'
    """
    if not isinstance(expected, Tensor) or not isinstance(actual, Tensor):
        if expected == actual or (expected != expected and actual != actual):
            return None
        if (
            isinstance(expected, float)
            and isinstance(actual, float | int)
            and abs(actual - expected) <= tolerance * scale
        ):
            return None
        return f"is {actual!r}, torch has {expected!r}"
    if actual.shape != expected.shape:
        return f"has a part of shape {tuple(actual.shape)}, which should be {tuple(expected.shape)}"
    if actual.dtype != expected.dtype:
        return f"has a part of {actual.dtype}, which should be {expected.dtype}"
    if torch.equal(actual, expected):
        return None
    if expected.is_floating_point() and torch.allclose(
        actual.double(), expected.double(), rtol=0.0, atol=tolerance * scale, equal_nan=True
    ):
        return None
    return f"is {actual.tolist()}, torch has {expected.tolist()}"


def reduced(layout: Layout, parts: Sequence[Tensor]) -> Tensor:
    """Return the value of this rank's region of a partial tensor, given the parts of all ranks by rank."""
    mesh, this_coordinate = layout.mesh, layout.mesh.coordinate(comm.rank())

    def value(coordinate: tuple[int, ...], dim: int) -> Tensor:
        if dim == mesh.ndim:
            return parts[mesh.rank_at(coordinate)]
        placement = layout.placements[dim]
        if not isinstance(placement, Partial):
            return value(coordinate, dim + 1)
        values = torch.stack(
            [value((*coordinate[:dim], at, *coordinate[dim + 1 :]), dim + 1) for at in range(mesh.shape[dim])]
        )
        match placement.op:
            case "sum":
                return values.sum(0).to(values.dtype)
            case "avg":
                return values.double().mean(0).to(values.dtype)
            case "max":
                return values.amax(0)
            case "min":
                return values.amin(0)
            case "product":
                return values.prod(0).to(values.dtype)
            case "band":
                return _folded(torch.bitwise_and, values)
            case "bor":
                return _folded(torch.bitwise_or, values)
            case "bxor":
                return _folded(torch.bitwise_xor, values)
            case other:
                raise ValueError(f"Partial({other!r}) is not a reduction")

    return value(this_coordinate, 0)


def _folded(operation: Callable[[Tensor, Tensor], Tensor], values: Tensor) -> Tensor:
    return functools.reduce(operation, values.unbind(0))
