"""What a captured program depends on: the tensors it is given or can name, and a key of all else."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from types import CellType, FunctionType, MethodType
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from shardwright.errors import CaptureError
from shardwright.tensor.local import DTensorBase, no_torch_function
from shardwright.tensor.seeing import policy

__all__ = ["gather", "held_by"]

_dtype, _device, _shape, _requires_grad, _is_leaf = (
    getattr(Tensor, name).__get__ for name in ("dtype", "device", "shape", "requires_grad", "is_leaf")
)
_stride = Tensor.stride


class _Inputs:
    """The tensors of a call in order, each once, and the key under which its program is found."""

    __slots__ = ("_places", "key", "tensors")

    def __init__(self) -> None:
        self.tensors: list[Any] = []
        self.key: list[Any] = []
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
        elif isinstance(value, nn.Module):
            self.key.append(value)
            self.add_module(value)
        elif type(value) not in pytree.SUPPORTED_NODES:
            self._add_static(value, where)
        else:
            leaves, spec = pytree.tree_flatten(value)
            self.key.append(spec)
            for leaf in leaves:
                self.add(leaf, where)

    def add_tensor(self, tensor: Tensor) -> None:
        """A tensor: by layout or shape, dtype, strides, and whether a gradient is asked for."""
        place = self._places.setdefault(id(tensor), len(self.tensors))
        if place < len(self.tensors):
            self.key.append(place)
            return  # the same one again
        self.tensors.append(tensor)
        which: Any
        if isinstance(tensor, DTensorBase):
            if type(tensor) is not DTensorBase.concrete:
                tensor.dtype  # noqa: B018  # one whose values are under way waits for them
            which = tensor._layout if "_copied" not in tensor.__dict__ else (tensor._layout, "copied")
        else:
            which = (_shape(tensor), _device(tensor))
        self.key.append((which, _dtype(tensor), _stride(tensor), _requires_grad(tensor), _is_leaf(tensor)))

    def add_module(self, module: nn.Module) -> None:
        """A module's parameters and buffers, and whether it is being trained, it and all below it."""
        self.key.append(module.training)
        for held in (module._parameters, module._buffers):
            for tensor in held.values():
                if tensor is None:
                    self.key.append(None)
                else:
                    self.add_tensor(tensor)
        for below in module._modules.values():
            if below is not None:
                self.add_module(below)

    def add_held(self, value: Any) -> None:
        """What a function names: of it, tensors and modules are inputs."""
        if isinstance(value, Tensor):
            self.add_tensor(value)
        elif isinstance(value, nn.Module):
            self.key.append(value)
            self.add_module(value)

    def _add_static(self, value: Any, where: int | str) -> None:
        try:
            hash(value)
        except TypeError:
            raise CaptureError(
                f"argument {where!r} is a {type(value).__name__}, which is neither a tensor nor hashable: a "
                "program is captured once for each value, so values must be comparable"
            ) from None
        self.key += (type(value), value)


def held_by(function: Callable[..., Any]) -> list[Callable[[], Any]]:
    """Where a function finds what it is not given: defaults, its closure, globals that it names, the object it is of.

    Functions it names are looked into as well, those of torch apart.
    """
    found: list[Callable[[], Any]] = []
    seen: set[int] = set()

    def visit(value: Any) -> None:
        if isinstance(value, MethodType):
            owner = value.__self__
            if isinstance(owner, nn.Module):
                found.append(lambda: owner)
            elif not isinstance(owner, type):
                names = [name for name, held in vars(owner).items() if isinstance(held, Tensor | nn.Module)]
                found.extend(partial(getattr, owner, name, None) for name in names)
            value = value.__func__
        elif isinstance(value, nn.Module | Tensor):
            found.append(lambda: value)
        if not isinstance(value, FunctionType) or id(value) in seen:
            return
        seen.add(id(value))
        for get in _names_of(value):
            named = get()
            if isinstance(named, Tensor | nn.Module):
                found.append(get)
            elif isinstance(named, FunctionType) and not (named.__module__ or "").startswith(("torch", "shardwright")):
                visit(named)

    visit(function)
    return found


def _names_of(function: FunctionType) -> Iterator[Callable[[], Any]]:
    for default in (*(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values()):
        yield partial(_itself, default)
    for cell in function.__closure__ or ():
        yield partial(_contents, cell)
    for name in function.__code__.co_names:
        if name in function.__globals__:
            yield partial(function.__globals__.get, name)


def _itself(value: Any) -> Any:
    return value


def _contents(cell: CellType) -> Any:
    try:
        return cell.cell_contents
    except ValueError:
        return None  # not assigned yet


def surroundings() -> tuple[Any, ...]:
    """What else decides how a program runs: modes of torch, policies of ours."""
    grad, inference = torch.is_grad_enabled(), torch.is_inference_mode_enabled()
    cast: Any = None
    if torch._C._is_any_autocast_enabled():
        kinds = ("cpu", "cuda")
        cast = tuple((torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)) for kind in kinds)
    return grad, inference, cast, torch.get_default_dtype(), policy.current(), policy.replicates_implicitly()


def gather(args: Any, kwargs: dict[str, Any], held: list[Callable[[], Any]]) -> tuple[list[Any], tuple[Any, ...]]:
    """The tensors of a call of a function that holds these, each once, and the key of its program."""
    if not kwargs and not held:
        short = _gather_alone(args)
        if short is not None:
            return short
    inputs = _Inputs()
    with no_torch_function():
        for place, value in enumerate(args):
            inputs.add(value, place)
        for name, value in kwargs.items():
            inputs.key.append(name)
            inputs.add(value, name)
        for get in held:
            inputs.add_held(get())
    return inputs.tensors, (*inputs.key, *surroundings())


def _gather_alone(args: Any) -> tuple[list[Any], tuple[Any, ...]] | None:
    """The same for DTensors alone, all different, at less cost; None where there is anything else."""
    key: list[Any] = []
    concrete = DTensorBase.concrete
    with no_torch_function():
        for tensor in args:
            if type(tensor) is not concrete or "_copied" in tensor.__dict__:
                return None
            key.append((tensor._layout, _dtype(tensor), _stride(tensor), _requires_grad(tensor), _is_leaf(tensor)))
    if len(args) > 1 and len(set(map(id, args))) < len(args):
        return None
    return args, (*key, *surroundings())
