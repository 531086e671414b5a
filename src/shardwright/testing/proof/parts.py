"""What a call is made of: the calls of operators with rules that it comes to, by a run on whole tensors.

An operator written in terms of others is right if those are. So they are what is proved of it: the very calls, with
the very values, that a sample of it makes.
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
    """A call of an operator that has a rule, on whole plain tensors."""

    name: str
    func: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]


def parts_of(call: Callable[[Sequence[Tensor]], Any], tensors: Sequence[Tensor]) -> list[PartCall]:
    """The calls of operators with rules that a call comes to, each pattern once, however its tensors are cut."""
    found: dict[Any, PartCall] = {}

    def tell(name: str, func: Any, args: Any, kwargs: dict[str, Any]) -> None:
        op = operator(name)
        if op is None or op.rule is None:
            return
        with no_torch_function():
            part = PartCall(name, func, _plain(args), _plain(kwargs))
            found.setdefault(pattern_of(part), part)

    for placements in _manners(tensors):
        mesh = Mesh((1,))
        with torch.no_grad(), no_torch_function():
            given = [
                tag(tensor.detach().clone(), Layout(mesh, [placement], tuple(tensor.shape)))
                for tensor, placement in zip(tensors, placements, strict=True)
            ]
        with listen(tell), trace():
            try:
                call(given)
            except Exception:  # noqa: BLE001  # what it came to before it was refused is to be proved all the same
                continue
    return list(found.values())


def _manners(tensors: Sequence[Tensor]) -> Iterator[list[Placement]]:
    """All whole; all cut along one dimension, as far as they have it."""
    yield [Replicate()] * len(tensors)
    for dim in range(max((tensor.ndim for tensor in tensors), default=0)):
        yield [Shard(dim) if dim < tensor.ndim else Replicate() for tensor in tensors]


def _plain(value: Any) -> Any:
    """A value with plain tensors in place of DTensors, which are whole here: there is one rank."""
    if isinstance(value, DTensorBase):
        plain = value.detach()
        return plain.as_subclass(Tensor).clone()
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    if type(value) in (list, tuple):
        return type(value)(_plain(item) for item in value)
    return value


def pattern_of(part: PartCall) -> Any:
    """What two calls that need one proof have in common."""
    return (part.name, part.func, _pattern(part.args), _pattern(tuple(sorted(part.kwargs.items()))))


def _pattern(value: Any) -> Any:
    if isinstance(value, Tensor):
        return ("tensor", value.dtype, tuple(value.shape))
    if isinstance(value, list | tuple):
        return (type(value).__name__, tuple(_pattern(item) for item in value))
    return repr(value)
