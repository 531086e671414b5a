"""What a captured program depends on: the tensors it is given or can name, and a key of all else."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from types import FunctionType
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from shardwright.errors import CaptureError
from shardwright.tensor.api.tracked_copy import TrackedCopy
from shardwright.tensor.base import policy
from shardwright.tensor.base.copied import refuse_stale
from shardwright.tensor.base.tagging import DTensorBase, no_torch_function
from shardwright.tensor.compiled.guards import Held
from shardwright.tensor.compiled.guards_collect import Looks

__all__ = ["Call", "gather"]

_dtype, _device, _shape, _requires_grad, _is_leaf = (
    getattr(Tensor, name).__get__ for name in ("dtype", "device", "shape", "requires_grad", "is_leaf")
)
_stride = Tensor.stride


class _Inputs:
    """The tensors of a call in order, each once, and the key under which its program is found."""

    __slots__ = ("_looks", "_places", "held", "key", "tensors")

    def __init__(self, looks: Looks) -> None:
        self.tensors: list[Any] = []
        self.key: list[Any] = []
        self.held: list[Held] = []
        self._looks = looks
        self._places: dict[int, int] = {}

    def add(self, value: Any, where: int | str) -> None:
        """An argument: tensors by what is known of them before their values, everything else by value."""
        kind = type(value)
        if isinstance(value, Tensor):
            self.add_tensor(value)
        elif kind in (list, tuple):
            self.key += (kind, len(value))
            for item in value:
                self.add(item, where)
        elif kind is dict:
            self.key += (dict, *value)
            for item in value.values():
                self.add(item, where)
        elif kind is slice:
            self.key.append(slice)
            self.add((value.start, value.stop, value.step), where)
        elif isinstance(value, nn.Module | FunctionType | partial):
            self.add_held(self._looks.at(value))
        elif type(value) not in pytree.SUPPORTED_NODES:
            self._add_static(value, where)
        else:
            leaves, spec = pytree.tree_flatten(value)
            self.key.append(spec)
            for leaf in leaves:
                self.add(leaf, where)

    def add_tensor(self, tensor: Tensor) -> None:
        """A tensor: by layout or shape, dtype, strides, and whether a gradient is asked for."""
        if type(tensor) is TrackedCopy:
            refuse_stale("sw.compile", tensor)
        place = self._places.setdefault(id(tensor), len(self.tensors))
        if place < len(self.tensors):
            self.key.append(place)
            return  # the same one again
        self.tensors.append(tensor)
        which: Any
        if isinstance(tensor, DTensorBase):
            if type(tensor) is not DTensorBase.concrete:
                tensor.dtype  # noqa: B018  # one whose values are under way waits for them
            which = (tensor._layout, "copied") if type(tensor) is TrackedCopy else tensor._layout
        else:
            which = (_shape(tensor), _device(tensor))
        self.key.append((which, _dtype(tensor), _stride(tensor), _requires_grad(tensor), _is_leaf(tensor)))

    def add_held(self, held: Held) -> None:
        """What is held: tensors as those of arguments, everything else by the key that is known."""
        self.held.append(held)
        self.key.append(held.key)
        for tensor in held.tensors():
            if tensor is None:
                self.key.append(None)
            else:
                self.add_tensor(tensor)

    def _add_static(self, value: Any, where: int | str) -> None:
        try:
            hash(value)
        except TypeError:
            raise CaptureError(
                f"argument {where!r} is a {type(value).__name__}, which is neither a tensor nor hashable: a "
                "program is captured once for each value, so values must be comparable"
            ) from None
        self.key += (type(value), value.hex() if type(value) is float else value)  # -0.0 is not 0.0


def surroundings() -> tuple[Any, ...]:
    """What else decides how a program runs: modes of torch, policies of ours."""
    grad, inference = torch.is_grad_enabled(), torch.is_inference_mode_enabled()
    cast: Any = None
    if torch._C._is_any_autocast_enabled():
        kinds = ("cpu", "cuda")
        cast = tuple((torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)) for kind in kinds)
    return grad, inference, cast, torch.get_default_dtype(), policy.current(), policy.replicates_implicitly()


class Call(NamedTuple):
    """What a program is given, and how it is found."""

    tensors: Sequence[Any]  # each once
    key: tuple[Any, ...]
    held: Sequence[Held]  # by the function, and by those among its arguments


def gather(args: Any, kwargs: dict[str, Any], function: Any, looks: Looks) -> Call:
    """A call of the function: its tensors, held ones included, and the key of its program."""
    held = looks.at(function)
    if not kwargs and not held.has_tensors():
        short = _gather_alone(args, held)
        if short is not None:
            return short
    inputs = _Inputs(looks)
    with no_torch_function():
        for place, value in enumerate(args):
            inputs.add(value, place)
        for name, value in kwargs.items():
            inputs.key.append(name)
            inputs.add(value, name)
        inputs.add_held(held)
    return Call(inputs.tensors, (*inputs.key, *surroundings()), inputs.held)


def _gather_alone(args: Any, held: Held) -> Call | None:
    """The same for DTensors alone, all different, at less cost; None where there is anything else."""
    key: list[Any] = []
    concrete = DTensorBase.concrete
    with no_torch_function():
        for tensor in args:
            if type(tensor) is not concrete:
                return None
            key.append((tensor._layout, _dtype(tensor), _stride(tensor), _requires_grad(tensor), _is_leaf(tensor)))
    if len(args) > 1 and len(set(map(id, args))) < len(args):
        return None
    return Call(args, (*key, held.key, *surroundings()), (held,))
