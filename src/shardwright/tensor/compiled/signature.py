"""The inputs of a call: the tensors among its arguments and in its function, and a key of everything else."""

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
from shardwright.tensor.compiled.guards import Guards
from shardwright.tensor.compiled.guards_collect import GuardCache

__all__ = ["Call", "describe_call"]

_dtype, _device, _shape, _requires_grad, _is_leaf = (
    getattr(Tensor, name).__get__ for name in ("dtype", "device", "shape", "requires_grad", "is_leaf")
)
_stride = Tensor.stride


class _Inputs:
    """The tensors of a call in order, each once, and the key of its program."""

    __slots__ = ("_cache", "_indices", "guards", "key", "tensors")

    def __init__(self, cache: GuardCache) -> None:
        self.tensors: list[Any] = []
        self.key: list[Any] = []
        self.guards: list[Guards] = []
        self._cache = cache
        self._indices: dict[int, int] = {}

    def add(self, value: Any, where: int | str) -> None:
        """Add an argument: tensors by their metadata, everything else by value."""
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
            self.add_guards(self._cache.get(value))
        elif type(value) not in pytree.SUPPORTED_NODES:
            self._add_static(value, where)
        else:
            leaves, spec = pytree.tree_flatten(value)
            self.key.append(spec)
            for leaf in leaves:
                self.add(leaf, where)

    def add_tensor(self, tensor: Tensor) -> None:
        """Add a tensor: by layout or shape, dtype, strides and requires_grad."""
        if type(tensor) is TrackedCopy:
            refuse_stale("sw.compile", tensor)
        index = self._indices.setdefault(id(tensor), len(self.tensors))
        if index < len(self.tensors):
            self.key.append(index)
            return  # already an input
        self.tensors.append(tensor)
        sharding: Any
        if isinstance(tensor, DTensorBase):
            if type(tensor) is not DTensorBase.concrete:
                tensor.dtype  # noqa: B018  # an AsyncDTensor waits for its values
            sharding = (tensor._layout, "copied") if type(tensor) is TrackedCopy else tensor._layout
            if "_use" in tensor.__dict__:
                sharding = (sharding, tensor._use)
        else:
            sharding = (_shape(tensor), _device(tensor))
        self.key.append((sharding, _dtype(tensor), _stride(tensor), _requires_grad(tensor), _is_leaf(tensor)))

    def add_guards(self, guards: Guards) -> None:
        """Add what a function refers to: its tensors, and the key of everything else."""
        self.guards.append(guards)
        self.key.append(guards.key)
        for tensor in guards.tensors():
            if tensor is None:
                self.key.append(None)
            else:
                self.add_tensor(tensor)

    def _add_static(self, value: Any, where: int | str) -> None:
        try:
            hash(value)
        except TypeError:
            raise CaptureError(
                f"argument {where!r} must be a tensor or hashable, got {type(value).__name__}: a program is captured "
                "once for each value"
            ) from None
        self.key += (type(value), value.hex() if type(value) is float else value)  # -0.0 differs from 0.0


def global_state() -> tuple[Any, ...]:
    """Return the global state on which a program depends: modes of torch and policies of this library."""
    grad, inference = torch.is_grad_enabled(), torch.is_inference_mode_enabled()
    cast: Any = None
    if torch._C._is_any_autocast_enabled():
        kinds = ("cpu", "cuda")
        cast = tuple((torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)) for kind in kinds)
    return grad, inference, cast, torch.get_default_dtype(), policy.current(), policy.replicates_implicitly()


class Call(NamedTuple):
    """The inputs of a program, and its key."""

    tensors: Sequence[Any]  # each once
    key: tuple[Any, ...]
    guards: Sequence[Guards]  # of the function, and of functions among its arguments


def describe_call(args: Any, kwargs: dict[str, Any], function: Any, cache: GuardCache) -> Call:
    """Return the inputs of a call, including the tensors the function refers to, and the key of its program."""
    guards = cache.get(function)
    if not kwargs and not guards.has_tensors():
        fast = _describe_dtensors(args, guards)
        if fast is not None:
            return fast
    inputs = _Inputs(cache)
    with no_torch_function():
        for index, value in enumerate(args):
            inputs.add(value, index)
        for name, value in kwargs.items():
            inputs.key.append(name)
            inputs.add(value, name)
        inputs.add_guards(guards)
    return Call(inputs.tensors, (*inputs.key, *global_state()), inputs.guards)


def _describe_dtensors(args: Any, guards: Guards) -> Call | None:
    """Describe a call whose arguments are distinct DTensors, at less cost; None if they are not."""
    key: list[Any] = []
    concrete = DTensorBase.concrete
    with no_torch_function():
        for tensor in args:
            if type(tensor) is not concrete:
                return None
            key.append((tensor._layout, _dtype(tensor), _stride(tensor), _requires_grad(tensor), _is_leaf(tensor)))
    if len(args) > 1 and len(set(map(id, args))) < len(args):
        return None
    return Call(args, (*key, guards.key, *global_state()), (guards,))
