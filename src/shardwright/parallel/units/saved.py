"""What autograd saves of gathered parameters: a reference to the unit, not the gathered memory.

A saved tensor that is a view of a gathered parameter is kept as the unit, the index of the parameter and the geometry
of the view, and asked for again in backward. So releasing a unit means dropping the reference to its memory. All other
saved tensors go to the hooks that were active before: those of activation checkpointing or offloading.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol, final
from weakref import ReferenceType, ref

import torch
from torch import Tensor

from shardwright.errors import InPlaceError

__all__ = ["PackGatheredParameters", "SavedUnit", "forget_buffers", "packs_gathered_parameters", "remember_buffers"]

_autograd = torch._C._autograd


class SavedUnit(Protocol):
    """A unit, as saved tensors see it."""

    def mark(self, index: int) -> object:
        """Return the state of a parameter, to tell later whether it was written to."""
        ...

    def value_again(self, index: int, mark: object) -> Tensor:
        """Return the gathered value of a parameter; raise if it was written to since it was marked."""
        ...


@dataclass(frozen=True, slots=True)
class _View:
    """A saved view of a gathered parameter."""

    unit: SavedUnit
    index: int
    mark: object
    size: torch.Size
    stride: tuple[int, ...]
    offset: int


class _Kept(NamedTuple):
    """A saved tensor that no hook takes, with its version when it was saved."""

    tensor: Tensor
    version: int


class _Passed(NamedTuple):
    """A saved tensor that the hooks outside have packed."""

    packed: Any


# By the address of the memory. A unit that is not used any more must not be kept alive by its buffers.
_buffers: dict[int, tuple[ReferenceType[SavedUnit], int, torch.dtype]] = {}


def remember_buffers(unit: SavedUnit, values: list[Tensor]) -> list[int]:
    """Recognise views of these gathered values from now on; return the addresses, for `forget_buffers`."""
    addresses = []
    for index, value in enumerate(values):
        if value.numel():
            address = _address(value)
            _buffers[address] = ref(unit), index, value.dtype
            addresses.append(address)
    return addresses


def forget_buffers(addresses: list[int]) -> None:
    """Recognise these buffers no longer."""
    for address in addresses:
        _buffers.pop(address, None)


def _address(tensor: Tensor) -> int:
    """Return the address of a tensor's memory; of its storage object, if it has no memory."""
    if tensor.is_meta:
        return int(tensor.untyped_storage()._cdata)
    return tensor.data_ptr() - int(tensor.storage_offset()) * tensor.element_size()


class _Hooks:
    """Saved-tensor hooks that keep gathered parameters as references, and pass all else to the hooks outside."""

    def __init__(self, outside: tuple[Callable[[Tensor], Any], Callable[[Any], Tensor]] | None) -> None:
        self.outside = outside

    def pack(self, tensor: Tensor) -> Any:
        if type(tensor) is Tensor and _buffers:
            offset = int(tensor.storage_offset())
            found = _buffers.get(_address(tensor))
            unit = None if found is None else found[0]()
            if found is not None and unit is not None and found[2] is tensor.dtype:
                index = found[1]
                return _View(unit, index, unit.mark(index), tensor.size(), tensor.stride(), offset)
        if self.outside is not None:
            return _Passed(self.outside[0](tensor))
        # An operator that saves its result gives the result itself, whose history would keep it alive.
        kept = tensor.detach() if tensor.requires_grad else tensor
        return _Kept(kept, 0 if kept.is_inference() else kept._version)

    def unpack(self, packed: Any) -> Tensor:
        if isinstance(packed, _View):
            value = packed.unit.value_again(packed.index, packed.mark)
            return value.as_strided(packed.size, packed.stride, packed.offset)
        if isinstance(packed, _Passed):
            assert self.outside is not None
            return self.outside[1](packed.packed)
        kept: _Kept = packed
        if not kept.tensor.is_inference() and kept.tensor._version != kept.version:
            raise InPlaceError(
                f"backward: a saved tensor of shape {tuple(kept.tensor.shape)} was written to in place after it was "
                f"used (it is at version {kept.tensor._version}, expected {kept.version}): write to a clone() instead"
            )
        return kept.tensor


@final
class PackGatheredParameters:
    """The context in which gathered parameters that autograd saves are kept as references to their units.

    >>> with PackGatheredParameters():
    ...     packs_gathered_parameters()
    True
    """

    __slots__ = ("_pushed",)

    def __enter__(self) -> None:
        self._pushed = not packs_gathered_parameters()
        if self._pushed:
            hooks = _Hooks(_autograd._top_saved_tensors_default_hooks(True))
            _autograd._push_saved_tensors_default_hooks(hooks.pack, hooks.unpack)

    def __exit__(self, *_: object) -> None:
        if self._pushed:
            _autograd._pop_saved_tensors_default_hooks()


def packs_gathered_parameters() -> bool:
    """Return whether nothing is saved, or `PackGatheredParameters` is the innermost of the saved-tensor hooks.

    >>> with PackGatheredParameters():
    ...     packs_gathered_parameters()
    True
    """
    if not torch.is_grad_enabled():
        return True
    innermost = _autograd._top_saved_tensors_default_hooks(True)
    return innermost is not None and isinstance(getattr(innermost[0], "__self__", None), _Hooks)
