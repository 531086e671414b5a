"""`distribute_module`: make a module's parameters and buffers DTensors, keeping tied ones tied.

A tied tensor is one object registered under several names (the embedding and the output layer of a language model).
Each is distributed with its own submodule, so ties are found before and restored afterwards.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from inspect import Signature, signature
from typing import Any, TypeAlias
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from shardwright import comm
from shardwright.errors import ArgumentTypeError, TensorError
from shardwright.tensor.api.distribute import distribute_tensor
from shardwright.tensor.api.dtensor import DTensor
from shardwright.tensor.base.tagging import no_torch_function

__all__ = ["distribute_module"]


@dataclass(frozen=True, slots=True)
class _Slot:
    """A name under which a module registers a parameter or buffer."""

    name: str
    table: dict[str, Any]  # the module's `_parameters` or `_buffers`
    key: str

    @property
    def tensor(self) -> Any:
        return self.table.get(self.key)

    def put(self, tensor: Any) -> None:
        self.table[self.key] = tensor


def distribute_module(
    module: nn.Module,
    device_mesh: Any = None,
    partition_fn: Callable[[str, nn.Module, Any], None] | None = None,
    input_fn: Callable[..., Any] | None = None,
    output_fn: Callable[..., Any] | None = None,
) -> nn.Module:
    """Make the module's parameters and buffers DTensors, in place, and return it.

    `partition_fn(name, submodule, mesh)` is called for every submodule to distribute its tensors; those it leaves
    plain are replicated. Tied tensors (registered under several names) stay tied: `partition_fn` need only distribute
    one of them; if it gives two of them different placements, `TensorError` names both and the module is left
    unchanged. `input_fn(module, inputs, mesh)` and `output_fn(module, outputs, mesh)` run before and after forward. As
    in PyTorch they may leave out `module`, with a `FutureWarning`. The mesh defaults to that of the enclosing
    `with mesh:`, or all ranks in one dimension.

    Raise `TensorError` if `distribute_module` was already called on the module: its functions would run twice.

    >>> import torch, shardwright as sw
    >>> mesh = sw.init_device_mesh("cpu", (1,))
    >>> layer = sw.distribute_module(torch.nn.Linear(4, 2), mesh)
    >>> print(layer.weight.sharding)
    [2, 4] (0: R)
    """
    if getattr(module, _DISTRIBUTED, False):
        raise TensorError(
            f"distribute_module was already called on this {type(module).__name__}: distribute a module once, and "
            "change its parameters later with redistribute"
        )
    on_input, on_output = _of_module(input_fn, "input_fn"), _of_module(output_fn, "output_fn")
    mesh = _mesh(device_mesh)
    before = [(slot, slot.tensor) for slot in _slots(module)]
    tied = _tied(module)
    for name, submodule in module.named_modules():
        if partition_fn is not None:
            partition_fn(name, submodule, mesh)
    try:
        for slots in tied:
            _tie(slots)
    except TensorError:
        for slot, tensor in before:
            slot.put(tensor)
        raise
    for slots in _registered(module):  # all slots of a tensor at once, so that a tied one is sent once and stays tied
        _, tensor = slots[0]
        if not isinstance(tensor, DTensor):
            _put(slots, distribute_tensor(tensor, mesh))
    if tied:
        module.register_load_state_dict_pre_hook(_record_ties)  # type: ignore[no-untyped-call]  # torch's own
        module.register_load_state_dict_post_hook(_restore_ties)  # type: ignore[no-untyped-call]  # likewise
    if on_input is not None:
        module.register_forward_pre_hook(lambda mod, inputs: on_input(mod, inputs, mesh))
    if on_output is not None:
        module.register_forward_hook(lambda mod, _, outputs: on_output(mod, outputs, mesh))
    setattr(module, _DISTRIBUTED, True)
    return module


_DISTRIBUTED = (
    "_distribute_module_applied"  # PyTorch's attribute, so that its distribute_module rejects our modules too
)


def _mesh(device_mesh: Any) -> Any:
    """Return the mesh to pass to `partition_fn`: a DeviceMesh if there is one."""
    if device_mesh is not None:
        return device_mesh
    entered = comm.entered_mesh()
    return comm.current_mesh() if entered is None else entered


def _of_module(function: Callable[..., Any] | None, name: str) -> Callable[[nn.Module, Any, Any], Any] | None:
    """Return the function with signature (module, values, mesh), warning if it does not take the module."""
    if function is None:
        return None
    try:
        parameters = signature(function)
    except ValueError:  # some builtins have no signature
        return function
    counts = [count for count in (3, 2) if _takes(parameters, count)]
    if not counts:
        raise ArgumentTypeError(
            f"distribute_module: {name} must take three arguments, {name}(module, {name.removesuffix('_fn')}s, mesh), "
            f"got {name}{parameters}"
        )
    if counts[0] == 3:
        return function
    warnings.warn(
        f"Deprecating {name} that takes two arguments: write {name}(module, {name.removesuffix('_fn')}s, mesh)",
        FutureWarning,
        stacklevel=3,
    )
    return lambda _module, values, mesh: function(values, mesh)


def _takes(parameters: Signature, count: int) -> bool:
    try:
        parameters.bind(*[None] * count)
    except TypeError:
        return False
    return True


def _slots(module: nn.Module) -> Iterator[_Slot]:
    for prefix, submodule in module.named_modules():
        for table in (submodule._parameters, submodule._buffers):
            for key in table:
                yield _Slot(f"{prefix}.{key}" if prefix else key, table, key)


_Slots: TypeAlias = list[tuple[_Slot, Tensor]]  # the slots of one tensor, or of tensors on one memory


def _registered(module: nn.Module) -> list[_Slots]:
    """Return the registered tensors, with all slots of each.

    Distinct parameters on the same memory (`head.weight = nn.Parameter(embedding.weight.data)`) are grouped as well:
    a write to one shows in the other.
    """
    slots: dict[Any, _Slots] = {}
    for slot in _slots(module):
        if slot.tensor is not None:
            slots.setdefault(_identity(slot.tensor), []).append((slot, slot.tensor))
    return list(slots.values())


def _tied(module: nn.Module) -> list[_Slots]:
    return [slots for slots in _registered(module) if len(slots) > 1]


def _identity(tensor: Tensor) -> Any:
    """Return a key that is equal for one object, or for the same view of the same memory."""
    with no_torch_function():
        if tensor.layout is not torch.strided:
            return id(tensor)
        memory = Tensor.untyped_storage(tensor)._cdata
        return memory, tensor.storage_offset(), tuple(tensor.size()), tensor.stride(), tensor.dtype


def _tie(slots: _Slots) -> None:
    """Put one DTensor in all slots of a tied tensor, if any of them has been distributed."""
    chosen: _Slot | None = None
    for slot, before in slots:
        if slot.tensor is before or not isinstance(slot.tensor, DTensor):
            continue
        if chosen is None:
            chosen = slot
        _refuse_different(chosen, slot, "distribute_module")
    if chosen is not None:
        _put([(s, t) for s, t in slots if s.tensor is t or isinstance(s.tensor, DTensor)], chosen.tensor)


def _refuse_different(first: _Slot, second: _Slot, what: str) -> None:
    layouts = [getattr(slot.tensor, "_layout", None) for slot in (first, second)]
    if layouts[0] is not layouts[1]:
        raise TensorError(
            f"{what}: {first.name} and {second.name} are tied (one tensor under two names), but have different "
            f"placements: {layouts[0] or 'a plain tensor'} and {layouts[1] or 'a plain tensor'}. Give both the same "
            "placements, distribute only one of them, or untie them first"
        )


def _put(slots: _Slots, value: Tensor) -> None:
    """Register `value` in these slots; distinct objects on one memory become distinct objects on `value`'s."""
    objects: dict[int, Tensor] = {}
    for slot, before in slots:
        if id(before) not in objects:
            shared: Tensor = value
            if objects:
                shared = value.detach()
                if isinstance(before, nn.Parameter):
                    shared = nn.Parameter(shared, requires_grad=before.requires_grad)
            objects[id(before)] = shared
        slot.put(objects[id(before)])


# --- load_state_dict(assign=True) registers a new tensor in each slot -----------------------------------------------

_ties: WeakKeyDictionary[nn.Module, list[_Slots]] = WeakKeyDictionary()


def _record_ties(module: nn.Module, *_: Any) -> None:
    """Record which tensors are tied before a state dict is loaded."""
    by_object: dict[int, _Slots] = {}
    for slot in _slots(module):
        if slot.tensor is not None:
            by_object.setdefault(id(slot.tensor), []).append((slot, slot.tensor))
    _ties[module] = [slots for slots in by_object.values() if len(slots) > 1]


def _restore_ties(module: nn.Module, _: Any) -> None:
    """Restore ties that loading has broken; the slot loaded last wins, as it does if values are copied."""
    for slots in _ties.pop(module, []):
        loaded = [slot for slot, before in slots if slot.tensor is not before]
        for slot in loaded:
            _refuse_different(loaded[0], slot, "load_state_dict")
        for slot, _tensor in slots if loaded else ():
            slot.put(loaded[-1].tensor)
