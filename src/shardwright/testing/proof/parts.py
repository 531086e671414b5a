"""Decompose a call into the calls of operators with rules that it makes, by running it on full tensors.

An operator composed of others is correct if those are. So the proof covers exactly the calls, with the values, that a
sample of it makes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from shardwright.layout import Layout, Mesh, Placement, Replicate, Shard
from shardwright.tensor.base.registry import operator
from shardwright.tensor.base.tagging import DTensorBase, no_torch_function, tag
from shardwright.tensor.base.trace import trace
from shardwright.tensor.dispatch.dispatcher import listen

__all__ = ["PartCall", "parts_of", "pattern_of"]


class PartCall(NamedTuple):
    """A call of an operator that has a rule, on full plain tensors."""

    name: str
    func: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]


def parts_of(call: Callable[[Sequence[Tensor]], Any], tensors: Sequence[Tensor]) -> list[PartCall]:
    """Return the calls of operators with rules that a call makes for any sharding of its tensors, each pattern once."""
    parts: dict[Any, PartCall] = {}

    def record(name: str, func: Any, args: Any, kwargs: dict[str, Any]) -> None:
        op = operator(name)
        if op is None or op.rule is None:
            return
        with no_torch_function():
            part = PartCall(name, func, _plain(args), _plain(kwargs))
            parts.setdefault(pattern_of(part), part)

    for placements in _placements(tensors):
        mesh = Mesh((1,))
        with torch.no_grad(), no_torch_function():
            dtensors = [
                tag(tensor.detach().clone(), Layout(mesh, [placement], tuple(tensor.shape)))
                for tensor, placement in zip(tensors, placements, strict=True)
            ]
        with listen(record), trace():
            try:
                call(dtensors)
            except Exception:  # noqa: BLE001  # the calls made before the refusal are proved all the same
                continue
    return list(parts.values())


def _placements(tensors: Sequence[Tensor]) -> Iterator[list[Placement]]:
    """Yield all replicated; then all sharded along the same dimension, if they have it."""
    yield [Replicate()] * len(tensors)
    for dim in range(max((tensor.ndim for tensor in tensors), default=0)):
        yield [Shard(dim) if dim < tensor.ndim else Replicate() for tensor in tensors]


def _plain(value: Any) -> Any:
    """Replace DTensors in a value by their local tensors, which are the full tensors on one rank."""
    if isinstance(value, DTensorBase):
        plain = value.detach()
        return plain.as_subclass(Tensor).clone()
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    if type(value) in (list, tuple):
        return type(value)(_plain(item) for item in value)
    return value


def pattern_of(part: PartCall) -> Any:
    """Return a key that is equal for two calls that one proof covers."""
    return (part.name, part.func, _pattern(part.args), _pattern(tuple(sorted(part.kwargs.items()))))


def _pattern(value: Any) -> Any:
    if isinstance(value, Tensor):
        return ("tensor", value.dtype, tuple(value.shape))
    if isinstance(value, list | tuple):
        return (type(value).__name__, tuple(_pattern(item) for item in value))
    return repr(value)
