"""Collect the guards of a function: tensors it refers to become inputs, plain values become part of the key.

A function refers to its closure, its defaults, the globals it uses, the object it is a method of, and what these hold.
"""

from __future__ import annotations

import sys
from collections import deque
from collections.abc import Callable, Sequence
from functools import cache, partial
from types import CellType, CodeType, FunctionType, MappingProxyType, MemberDescriptorType, MethodType, ModuleType
from typing import Any, final

import torch
from torch import Tensor, nn
from torch.nn.modules import module as hooks

from shardwright.errors import CaptureError
from shardwright.tensor.compiled.guards import ById, Guards, Key, value_key

__all__ = ["GuardCache"]

MAX_DEPTH = 8  # of nested objects; nested modules do not count
MAX_VERSIONS = 4  # of the guards of one function
MAX_FUNCTIONS = 64  # the compiled function, and functions and modules among its arguments
MAX_ITEMS = 1000  # larger lists, sets and dicts are compared by identity
MAX_PASSES = 5  # each pass may find functions that use more names
FIRST_NAMES = frozenset(("forward", "__call__"))

_CONTAINERS = (list, tuple, deque, dict, set, frozenset)
_HOOKS = ("_forward_hooks", "_forward_pre_hooks")
_BACKWARD_HOOKS = ("_backward_hooks", "_backward_pre_hooks")
_GLOBAL_HOOKS = (
    hooks._global_forward_hooks,
    hooks._global_forward_pre_hooks,
    hooks._global_backward_hooks,
    hooks._global_backward_pre_hooks,
)
_OF_EVERY_MODULE = frozenset(vars(nn.Module())) - {"training"}


@final
class GuardCache:
    """The guards of a function and of those among its arguments, collected again only if something changed."""

    def __init__(self) -> None:
        self._known: dict[int, tuple[Guards, ...]] = {}  # by id: the guards keep the function alive

    def get(self, function: Any) -> Guards:
        """Return the guards that hold now for a function or module."""
        known = self._known.get(id(function), ())
        for guards in known:
            if guards.hold():
                if guards is not known[0]:  # most recently used first
                    self._known[id(function)] = (guards, *(other for other in known if other is not guards))
                return guards
        guards = collect_guards(function, known[0].names if known else FIRST_NAMES)
        self._known[id(function)] = (guards, *known[: MAX_VERSIONS - 1])
        while len(self._known) > MAX_FUNCTIONS:
            del self._known[next(iter(self._known))]
        return guards

    def check_unchanged(self, guards: Guards, tensors: Sequence[Any]) -> None:
        """Raise if the program changed plain values it refers to, or replaced these tensors."""
        now = self.get(guards.function)
        if now.key != guards.key:
            raise CaptureError(
                f"the program changes {guards.first_change()} while it runs, which a replay would not do: return the "
                "new value and store it outside of the compiled function, or keep it in a buffer and write to it in "
                "place; if it is set only once, call the function once before compiling it"
            )
        for label, before, after in zip(now.labels(), tensors, now.tensors(), strict=True):
            if before is not after:
                raise CaptureError(
                    f"the program replaces {label} by another tensor, which a replay would not do: write to it in "
                    "place (.copy_(value)), or return the new one and store it outside of the compiled function"
                )


def collect_guards(function: Any, names: frozenset[str]) -> Guards:
    """Collect the guards of a function or module; `names` are those that its functions are known to use."""
    for _ in range(MAX_PASSES):
        collector = _Collector(function, names)
        if collector.names == names:
            break
        names = frozenset(collector.names)
    return collector.guards


class _Collector:
    """One pass over everything a function refers to."""

    def __init__(self, function: Any, names: frozenset[str]) -> None:
        self.known, self.names = names, set(names)
        self.guards = Guards(function, names)
        self.entries: list[Any] = []
        self.seen: dict[int, int] = {}
        self.instances: list[Any] = []  # whose classes are guarded
        self.instance_labels: list[str] = []
        self._visit(function, getattr(function, "__name__", type(function).__name__), 0)
        for registered in _GLOBAL_HOOKS:
            self._visit_dict(registered, "the hooks of all modules", 0)
        if hooks._global_backward_hooks or hooks._global_backward_pre_hooks:
            self.guards.backward_hooks.append("every module")
        self.guards.guard_values(type, self.instances, [*map(type, self.instances)], self.instance_labels)
        self.guards.key = Key(self.entries)

    def _visit_items(
        self, source: dict[Any, Any] | Callable[[Any], Any], keys: Sequence[Any], labels: Sequence[str], depth: int
    ) -> None:
        """Visit the values of these keys: tensors become inputs, everything else is guarded."""
        get = source.get if isinstance(source, dict) else source
        values = [get(key) for key in keys]
        items = list(zip(keys, values, labels, strict=True))
        tensors = [(key, label) for key, value, label in items if isinstance(value, Tensor)]
        if tensors:
            self.guards.add_tensors(partial(map, get, [key for key, _ in tensors]), [label for _, label in tensors])
        others = [item for item in items if not isinstance(item[1], Tensor)]
        if others:
            self.guards.guard_values(source, *map(list, zip(*others, strict=True)))
        for value, label in zip(values, labels, strict=True):
            if isinstance(value, Tensor):
                self.entries.append(Tensor)
            else:
                self._visit(value, label, depth + 1)

    def _visit(self, value: Any, label: str, depth: int) -> None:
        key = value_key(value)
        if key is not None:
            self.entries.append(key)
            return
        if id(value) in self.seen:
            self.entries.append(self.seen[id(value)])
            return
        self.seen[id(value)] = len(self.seen)
        if isinstance(value, nn.Module):
            self.entries.append(ById(value))
            self._visit_module(value, label, depth)
        elif depth > MAX_DEPTH or (isinstance(value, _CONTAINERS) and len(value) > MAX_ITEMS):
            self.entries.append(ById(value))
        elif isinstance(value, list | tuple | deque):
            self.entries += (type(value), len(value))
            if not isinstance(value, tuple):
                self.guards.guard_size(value, label)
            self._visit_items(value.__getitem__, range(len(value)), [f"{label}[{i}]" for i in range(len(value))], depth)
        elif isinstance(value, dict):
            self.entries.append(type(value))
            self._visit_dict(value, label, depth)
        elif isinstance(value, set | frozenset):
            self.entries += (type(value), frozenset(value_key(item) or ById(item) for item in value))
            self.guards.guard_set(value, label)
        elif isinstance(value, slice):
            self.entries.append(slice)
            self._visit_items(partial(getattr, value), ("start", "stop", "step"), (label,) * 3, depth)
        else:
            self.entries.append(ById(value))
            self._visit_object(value, label, depth)

    def _visit_dict(self, value: dict[Any, Any], label: str, depth: int) -> None:
        self.guards.guard_size(value, label)
        if value:
            keys = tuple(value)
            self.entries.append(tuple(value_key(key) or ById(key) for key in keys))
            self.guards.guard_keys(value, [label] * len(keys))
            self._visit_items(value, keys, [f"{label}[{key!r}]" if value_key(key) else label for key in keys], depth)

    def _visit_object(self, value: Any, label: str, depth: int) -> None:
        """Visit an object of another type."""
        if isinstance(value, FunctionType):
            self._visit_function(value, depth)
        elif isinstance(value, MethodType):
            self._visit_items(partial(getattr, value), ("__self__", "__func__"), ("self", label), depth)
        elif isinstance(value, partial):
            self._visit_items(partial(getattr, value), ("func", "args", "keywords"), (label,) * 3, depth)
        elif isinstance(value, property):
            self._visit_items(partial(getattr, value), ("fget",), (label,), depth)
        elif isinstance(value, staticmethod | classmethod):
            self._visit_items(partial(getattr, value), ("__func__",), (label,), depth)
        elif isinstance(value, type):
            for base in value.__mro__:
                if _is_own(base.__module__):
                    self._visit_used(vars(base), label, depth)
        elif isinstance(value, ModuleType):
            if _is_own(value.__name__):
                self._visit_used(vars(value), label, depth)
        else:
            self._visit_instance(value, label, depth)

    def _visit_instance(self, value: Any, label: str, depth: int) -> None:
        attributes = getattr(value, "__dict__", None)
        if not _is_own(type(value).__module__):
            if isinstance(attributes, dict) and "__wrapped__" in attributes:
                self._visit_items(attributes, ("__wrapped__",), (label,), depth)
            return
        if isinstance(attributes, dict):
            self.guards.guard_size(attributes, label)
            self._visit_used(attributes, label, depth)
        members = [vars(base) for base in type(value).__mro__]
        slots = [n for each in members for n in each if n in self.known and isinstance(each[n], MemberDescriptorType)]
        self._visit_items(partial(_attribute, value), slots, [f"{label}.{name}" for name in slots], depth)
        self._visit_class(value, label, depth)

    def _visit_class(self, value: Any, label: str, depth: int) -> None:
        self.instances.append(value)
        self.instance_labels.append(f"the class of {label}")
        self._visit(type(value), label, depth + 1)

    def _visit_used(self, attributes: dict[str, Any] | MappingProxyType[str, Any], label: str, depth: int) -> None:
        """Visit the attributes of an object, class or module that the functions use."""
        names = [name for name in attributes if name in self.known]
        source = attributes if isinstance(attributes, dict) else attributes.get
        self._visit_items(source, names, [f"{label}.{name}" for name in names], depth)

    def _visit_function(self, function: FunctionType, depth: int) -> None:
        code = function.__code__
        defaults, keywords = function.__defaults__ or (), function.__kwdefaults__ or {}
        first = code.co_argcount - len(defaults)
        self._visit_items(defaults.__getitem__, range(len(defaults)), code.co_varnames[first : code.co_argcount], depth)
        self._visit_items(keywords, tuple(keywords), tuple(keywords), depth)
        space = function.__globals__
        own = depth == 0 or _is_own(space.get("__name__", ""))  # the compiled function itself always is
        cells = dict(zip(code.co_freevars, function.__closure__ or (), strict=True))
        if not own:  # a wrapper from a library may hold a user's function; its caches do not matter
            cells = {name: cell for name, cell in cells.items() if _may_be_used(_contents(cell))}
        self._visit_items(_contents, tuple(cells.values()), tuple(cells), depth)
        if own:
            names = _names_in(code)
            self.names |= names
            known = sorted(name for name in names if name in space)
            self._visit_items(space, known, known, depth)

    def _visit_module(self, module: nn.Module, label: str, depth: int) -> None:
        """Visit a module: parameters and buffers, plain attributes, hooks and submodules."""
        if isinstance(module, torch.jit.ScriptModule):
            return  # it has no Python state
        attributes = vars(module)
        self.guards.guard_size(attributes, label)
        names = [name for name in attributes if name not in _OF_EVERY_MODULE]
        self._visit_items(attributes, names, [f"{label}.{name}" for name in names], depth)
        self._visit_class(module, label, depth)
        for tensors in (module._parameters, module._buffers):
            self.guards.guard_size(tensors, label)
            if tensors:
                self.entries.append(tuple(tensors))
                self.guards.add_module_tensors(tensors, [f"{label}.{name}" for name in tensors])
        for kind in _HOOKS:
            self._visit_dict(attributes[kind], f"the hooks of {label}", depth)
        for kind in _BACKWARD_HOOKS:
            self._visit_dict(attributes[kind], f"the hooks of {label}", depth)
            if attributes[kind]:
                self.guards.backward_hooks.append(label)
        submodules = module._modules
        self.guards.guard_size(submodules, label)
        if submodules:
            self.entries.append(tuple(submodules))
            self.guards.guard_keys(submodules, [f"{label}.{name}" for name in submodules])
            self._visit_items(submodules, tuple(submodules), [f"{label}.{name}" for name in submodules], depth - 1)


def _attribute(value: Any, name: str) -> Any:
    return getattr(value, name, None)


def _contents(cell: CellType) -> Any:
    try:
        return cell.cell_contents
    except ValueError:
        return None  # not assigned yet


def _may_be_used(value: Any) -> bool:
    return callable(value) or isinstance(value, Tensor)


def _names_in(code: CodeType) -> frozenset[str]:
    """Return the globals and attributes that a function uses, including those of nested functions."""
    inner = [_names_in(const) for const in code.co_consts if isinstance(const, CodeType)]
    return frozenset(code.co_names).union(*inner)


@cache
def _is_own(module: str) -> bool:
    """Return whether a module belongs to the user's program: not the standard library, not an installed package."""
    root = module.partition(".")[0]
    if root in ("torch", "shardwright") or root in sys.stdlib_module_names or root == "builtins":
        return False
    file = getattr(sys.modules.get(module), "__file__", None) or ""
    return "site-packages" not in file and "dist-packages" not in file
