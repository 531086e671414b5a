"""Looking into a function: tensors it can name become inputs, plain values it can name make the program.

That is its closure, its defaults, the globals it names, the object it is a method of, and what these hold.
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
from shardwright.tensor.compiled.guards import Held, Itself, Key, plain

__all__ = ["Looks"]

DEPTH = 8  # of objects that hold objects; modules in modules do not count
KEPT = 4  # of what one function held at different times
LOOKED_INTO = 64  # functions and modules, the compiled one and arguments of it
LARGEST = 1000  # items of a list, set or dict that is looked into
PASSES = 5  # every pass may find functions, which name more
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
_OF_TORCH = frozenset(vars(nn.Module())) - {"training"}  # what every module has


@final
class Looks:
    """What a function and those among its arguments hold, looked into again only where something changed."""

    def __init__(self) -> None:
        self._known: dict[int, tuple[Held, ...]] = {}  # a Held keeps its function, so that no other has its id

    def at(self, function: Any) -> Held:
        """What a function or module holds now."""
        known = self._known.get(id(function), ())
        for held in known:
            if held.still():
                if held is not known[0]:  # the next call will find it first
                    self._known[id(function)] = (held, *(other for other in known if other is not held))
                return held
        held = look_into(function, known[0].names if known else FIRST_NAMES)
        self._known[id(function)] = (held, *known[: KEPT - 1])
        while len(self._known) > LOOKED_INTO:
            del self._known[next(iter(self._known))]
        return held

    def refuse_changes(self, held: Held, tensors: Sequence[Any]) -> None:
        """Raises where the program, which was given these tensors of it, put others or other values in their places."""
        now = self.at(held.function)
        if now.key != held.key:
            raise CaptureError(
                f"the program changes {held.changed()} while it runs, which a replay would not do: return the new "
                "value and store it outside of what is compiled, or keep it in a buffer and write to it in place; if "
                "it is set once and for all, call the function once before it is compiled"
            )
        for label, before, after in zip(now.labels(), tensors, now.tensors(), strict=True):
            if before is not after:
                raise CaptureError(
                    f"the program replaces {label} by another tensor, which a replay would not do: write to it in "
                    "place (.copy_(value)), or return the new one and store it outside of what is compiled"
                )


def look_into(function: Any, names: frozenset[str]) -> Held:
    """What a function or module holds; `names` are those that its functions are known to use."""
    for _ in range(PASSES):
        looking = _Looking(function, names)
        if looking.names == names:
            break
        names = frozenset(looking.names)
    return looking.held


class _Looking:
    """One pass over everything that can be reached."""

    def __init__(self, function: Any, names: frozenset[str]) -> None:
        self.known, self.names = names, set(names)
        self.held = Held(function, names)
        self.entries: list[Any] = []
        self.seen: dict[int, int] = {}
        self.instances: list[Any] = []  # whose classes are to stay
        self.instance_labels: list[str] = []
        self._look(function, getattr(function, "__name__", type(function).__name__), 0)
        for held in _GLOBAL_HOOKS:
            self._dict(held, "the hooks of all modules", 0)
        if hooks._global_backward_hooks or hooks._global_backward_pre_hooks:
            self.held.backward_hooks.append("every module")
        self.held.note(type, self.instances, [*map(type, self.instances)], self.instance_labels)
        self.held.key = Key(self.entries)

    def _hold(
        self, source: dict[Any, Any] | Callable[[Any], Any], places: Sequence[Any], labels: Sequence[str], depth: int
    ) -> None:
        """Looks at what is in these places: tensors are inputs, everything else is to stay."""
        get = source.get if isinstance(source, dict) else source
        values = [get(place) for place in places]
        each = list(zip(places, values, labels, strict=True))
        tensors = [(place, label) for place, value, label in each if isinstance(value, Tensor)]
        if tensors:
            self.held.note_tensors(partial(map, get, [place for place, _ in tensors]), [label for _, label in tensors])
        others = [one for one in each if not isinstance(one[1], Tensor)]
        if others:
            self.held.note(source, *map(list, zip(*others, strict=True)))
        for value, label in zip(values, labels, strict=True):
            if isinstance(value, Tensor):
                self.entries.append(Tensor)
            else:
                self._look(value, label, depth + 1)

    def _look(self, value: Any, label: str, depth: int) -> None:
        by_value = plain(value)
        if by_value is not None:
            self.entries.append(by_value)
            return
        if id(value) in self.seen:
            self.entries.append(self.seen[id(value)])
            return
        self.seen[id(value)] = len(self.seen)
        if isinstance(value, nn.Module):
            self.entries.append(Itself(value))
            self._module(value, label, depth)
        elif depth > DEPTH or (isinstance(value, _CONTAINERS) and len(value) > LARGEST):
            self.entries.append(Itself(value))
        elif isinstance(value, list | tuple | deque):
            self.entries += (type(value), len(value))
            if not isinstance(value, tuple):
                self.held.note_size(value, label)
            self._hold(value.__getitem__, range(len(value)), [f"{label}[{i}]" for i in range(len(value))], depth)
        elif isinstance(value, dict):
            self.entries.append(type(value))
            self._dict(value, label, depth)
        elif isinstance(value, set | frozenset):
            self.entries += (type(value), frozenset(plain(item) or Itself(item) for item in value))
            self.held.note_set(value, label)
        elif isinstance(value, slice):
            self.entries.append(slice)
            self._hold(partial(getattr, value), ("start", "stop", "step"), (label,) * 3, depth)
        else:
            self.entries.append(Itself(value))
            self._object(value, label, depth)

    def _dict(self, value: dict[Any, Any], label: str, depth: int) -> None:
        self.held.note_size(value, label)
        if value:
            keys = tuple(value)
            self.entries.append(tuple(plain(key) or Itself(key) for key in keys))
            self.held.note_keys(value, [label] * len(keys))
            self._hold(value, keys, [f"{label}[{key!r}]" if plain(key) else label for key in keys], depth)

    def _object(self, value: Any, label: str, depth: int) -> None:
        """Something else that may hold something."""
        if isinstance(value, FunctionType):
            self._function(value, depth)
        elif isinstance(value, MethodType):
            self._hold(partial(getattr, value), ("__self__", "__func__"), ("self", label), depth)
        elif isinstance(value, partial):
            self._hold(partial(getattr, value), ("func", "args", "keywords"), (label,) * 3, depth)
        elif isinstance(value, property):
            self._hold(partial(getattr, value), ("fget",), (label,), depth)
        elif isinstance(value, staticmethod | classmethod):
            self._hold(partial(getattr, value), ("__func__",), (label,), depth)
        elif isinstance(value, type):
            for base in value.__mro__:
                if _is_own(base.__module__):
                    self._named(vars(base), label, depth)
        elif isinstance(value, ModuleType):
            if _is_own(value.__name__):
                self._named(vars(value), label, depth)
        else:
            self._instance(value, label, depth)

    def _instance(self, value: Any, label: str, depth: int) -> None:
        held = getattr(value, "__dict__", None)
        if not _is_own(type(value).__module__):
            if isinstance(held, dict) and "__wrapped__" in held:
                self._hold(held, ("__wrapped__",), (label,), depth)
            return
        if isinstance(held, dict):
            self.held.note_size(held, label)
            self._named(held, label, depth)
        members = [vars(base) for base in type(value).__mro__]
        slots = [n for each in members for n in each if n in self.known and isinstance(each[n], MemberDescriptorType)]
        self._hold(partial(_attribute, value), slots, [f"{label}.{name}" for name in slots], depth)
        self._class_of(value, label, depth)

    def _class_of(self, value: Any, label: str, depth: int) -> None:
        self.instances.append(value)
        self.instance_labels.append(f"the class of {label}")
        self._look(type(value), label, depth + 1)

    def _named(self, held: dict[str, Any] | MappingProxyType[str, Any], label: str, depth: int) -> None:
        """Of an object, class or file: what the functions name."""
        names = [name for name in held if name in self.known]
        source = held if isinstance(held, dict) else held.get
        self._hold(source, names, [f"{label}.{name}" for name in names], depth)

    def _function(self, function: FunctionType, depth: int) -> None:
        code = function.__code__
        defaults, keywords = function.__defaults__ or (), function.__kwdefaults__ or {}
        first = code.co_argcount - len(defaults)
        self._hold(defaults.__getitem__, range(len(defaults)), code.co_varnames[first : code.co_argcount], depth)
        self._hold(keywords, tuple(keywords), tuple(keywords), depth)
        space = function.__globals__
        own = depth == 0 or _is_own(space.get("__name__", ""))  # what is compiled is, wherever it is from
        cells = dict(zip(code.co_freevars, function.__closure__ or (), strict=True))
        if not own:  # a wrapper of what is the user's may be of torch's; its caches are its own affair
            cells = {name: cell for name, cell in cells.items() if _may_be_used(_contents(cell))}
        self._hold(_contents, tuple(cells.values()), tuple(cells), depth)
        if own:
            names = _names_in(code)
            self.names |= names
            known = sorted(name for name in names if name in space)
            self._hold(space, known, known, depth)

    def _module(self, module: nn.Module, label: str, depth: int) -> None:
        """A module: parameters and buffers, plain attributes, hooks, and what is below it."""
        if isinstance(module, torch.jit.ScriptModule):
            return  # nothing of it is Python's
        held = vars(module)
        self.held.note_size(held, label)
        names = [name for name in held if name not in _OF_TORCH]
        self._hold(held, names, [f"{label}.{name}" for name in names], depth)
        self._class_of(module, label, depth)
        for row in (module._parameters, module._buffers):
            self.held.note_size(row, label)
            if row:
                self.entries.append(tuple(row))
                self.held.note_row(row, [f"{label}.{name}" for name in row])
        for kind in _HOOKS:
            self._dict(held[kind], f"the hooks of {label}", depth)
        for kind in _BACKWARD_HOOKS:
            self._dict(held[kind], f"the hooks of {label}", depth)
            if held[kind]:
                self.held.backward_hooks.append(label)
        below = module._modules
        self.held.note_size(below, label)
        if below:
            self.entries.append(tuple(below))
            self.held.note_keys(below, [f"{label}.{name}" for name in below])
            self._hold(below, tuple(below), [f"{label}.{name}" for name in below], depth - 1)


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
    """The globals and attributes that a function uses, those inside it too."""
    inner = [_names_in(const) for const in code.co_consts if isinstance(const, CodeType)]
    return frozenset(code.co_names).union(*inner)


@cache
def _is_own(module: str) -> bool:
    """Whether a file is of the user's program: not Python's, not ours, not an installed package's."""
    root = module.partition(".")[0]
    if root in ("torch", "shardwright") or root in sys.stdlib_module_names or root == "builtins":
        return False
    file = getattr(sys.modules.get(module), "__file__", None) or ""
    return "site-packages" not in file and "dist-packages" not in file
