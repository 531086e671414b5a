"""`Guards`: the objects that a captured function refers to, and whether it still refers to the same ones.

Objects are kept together with where they were found, so that checking the guards is a comparison by identity.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from enum import Enum
from functools import partial
from itertools import chain
from operator import call, is_
from typing import Any, final

import torch
from torch import Tensor

__all__ = ["ById", "Guards", "Key", "value_key"]

_PLAIN = (
    int, str, bytes, type(None), type(Ellipsis), range, Enum,
    torch.dtype, torch.device, torch.layout, torch.memory_format,
)  # fmt: skip

Reader = Callable[[], Iterable[Any]]


@final
class Key:
    """The plain values a function refers to, in order; compared by value, hashed once."""

    __slots__ = ("_entries", "_hash")

    def __init__(self, entries: Sequence[Any]) -> None:
        self._entries = tuple(entries)
        self._hash = hash(self._entries)

    def __hash__(self) -> int:
        return self._hash

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Key) and self._entries == other._entries


@final
class Guards:
    """The tensors and other objects that a function refers to."""

    def __init__(self, function: Any, names: frozenset[str]) -> None:
        self.function = function
        self.names = names  # globals and attributes that its functions use
        self.key = Key(())
        self.backward_hooks: list[str] = []  # the modules that have any
        self._module_tensors: list[Reader] = []  # parameters and buffers of modules, some of them None
        self._module_tensor_labels: list[str] = []
        self._other_tensors: list[Reader] = []
        self._other_tensor_labels: list[str] = []
        self._empty: list[Any] = []
        self._empty_labels: list[str] = []
        self._sized: list[Any] = []
        self._sizes: list[int] = []
        self._sized_labels: list[str] = []
        self._dicts: list[dict[Any, Any]] = []  # each once per guarded key
        self._keys: list[Any] = []
        self._values: list[Any] = []
        self._value_labels: list[str] = []
        self._readers: list[Reader] = []  # for values that are not in a dict
        self._read_values: list[Any] = []
        self._labels: list[str] = []
        self._sets: list[tuple[Any, frozenset[Any], str]] = []

    def tensors(self) -> Iterable[Any]:
        """Return the tensors the function refers to now, in order; None for a parameter or buffer that is None."""
        return chain.from_iterable(map(call, chain(self._module_tensors, self._other_tensors)))

    def has_tensors(self) -> bool:
        """Return whether the function refers to any tensors."""
        return bool(self._module_tensors or self._other_tensors)

    def hold(self) -> bool:
        """Return whether the function still refers to the same objects, apart from tensors."""
        if any(self._empty) or (self._sized and [*map(len, self._sized)] != self._sizes):
            return False
        if not all(map(is_, map(dict.get, self._dicts, self._keys), self._values)):
            return False
        if self._read_values and not all(map(is_, chain.from_iterable(map(call, self._readers)), self._read_values)):
            return False
        for read in self._other_tensors:
            for value in read():
                if not isinstance(value, Tensor):
                    return False
        return not self._sets or all(now == before for now, before, _ in self._sets)

    def labels(self) -> Sequence[str]:
        """Return the names of the tensors."""
        return *self._module_tensor_labels, *self._other_tensor_labels

    def first_change(self) -> str:
        """Return the name of an object that has changed."""
        for container, label in zip(self._empty, self._empty_labels, strict=True):
            if container:
                return _added_to(container, label)
        for container, size, label in zip(self._sized, self._sizes, self._sized_labels, strict=True):
            if len(container) != size:
                return _added_to(container, label) if len(container) > size else label
        for value, label in zip(
            chain.from_iterable(map(call, self._other_tensors)), self._other_tensor_labels, strict=True
        ):
            if not isinstance(value, Tensor):
                return label
        values = chain(map(dict.get, self._dicts, self._keys), chain.from_iterable(map(call, self._readers)))
        old, labels = chain(self._values, self._read_values), chain(self._value_labels, self._labels)
        for value, before, label in zip(values, old, labels, strict=True):
            if value is not before and (value_key(value) is None or value_key(value) != value_key(before)):
                return label
        for value, items, label in self._sets:
            if value != items:
                return label
        return "something that it refers to"

    # --- adding guards ----------------------------------------------------------------------------------------------

    def guard_size(self, container: Any, label: str) -> None:
        """Guard the number of items of a container."""
        if len(container):
            self._sized.append(container)
            self._sizes.append(len(container))
            self._sized_labels.append(label)
        else:
            self._empty.append(container)
            self._empty_labels.append(label)

    def guard_values(
        self,
        source: dict[Any, Any] | Callable[[Any], Any],
        keys: Sequence[Any],
        values: Sequence[Any],
        labels: Sequence[str],
    ) -> None:
        """Guard the values of these keys in a dict, or those a function returns for them."""
        if isinstance(source, dict):
            self._dicts += [source] * len(keys)
            self._keys += keys
            self._values += values
            self._value_labels += labels
        else:
            self._guard(partial(map, source, keys), values, labels)

    def guard_keys(self, container: dict[Any, Any], labels: Sequence[str]) -> None:
        """Guard the keys of a dict and their order."""
        self._guard(container.__iter__, tuple(container), labels)

    def _guard(self, read: Reader, values: Sequence[Any], labels: Sequence[str]) -> None:
        self._readers.append(read)
        self._read_values += values
        self._labels += labels

    def add_module_tensors(self, tensors: dict[str, Any], labels: Sequence[str]) -> None:
        """Make all tensors of a dict inputs."""
        self.guard_keys(tensors, labels)
        self._module_tensors.append(tensors.values)
        self._module_tensor_labels += labels

    def add_tensors(self, read: Reader, labels: Sequence[str]) -> None:
        """Make these tensors inputs."""
        self._other_tensors.append(read)
        self._other_tensor_labels += labels

    def guard_set(self, value: Any, label: str) -> None:
        """Guard the items of a set."""
        self._sets.append((value, frozenset(value), label))


@final
class ById:
    """An object compared by identity."""

    __slots__ = ("value",)

    def __init__(self, value: Any) -> None:
        self.value = value

    def __hash__(self) -> int:
        return id(self.value)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, ById) and self.value is other.value


def value_key(value: Any) -> tuple[Any, ...] | None:
    """Return a key by which a plain value is compared; None if the value is not plain."""
    if isinstance(value, _PLAIN):
        return (type(value), value)
    if isinstance(value, float):
        return (type(value), value.hex())  # -0.0 differs from 0.0, and nan equals nan
    if isinstance(value, complex):
        return (type(value), value.real.hex(), value.imag.hex())
    return None


def _added_to(container: Any, label: str) -> str:
    """Return the name of the last item added to a container, or of the container itself."""
    last = next(reversed(container)) if isinstance(container, dict) else None
    return f"{label}.{last}" if isinstance(last, str) else label
