"""What a function held when it was looked into, and whether it still does.

What was seen is kept together with where it was seen, so that a later call only asks whether the same objects are still
there.
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

__all__ = ["Held", "Itself", "Key", "plain"]

_PLAIN = (
    int, str, bytes, type(None), type(Ellipsis), range, Enum,
    torch.dtype, torch.device, torch.layout, torch.memory_format,
)  # fmt: skip

Reader = Callable[[], Iterable[Any]]


@final
class Key:
    """Everything plain that was seen, in order; compared by value, hashed once."""

    __slots__ = ("_entries", "_hash")

    def __init__(self, entries: Sequence[Any]) -> None:
        self._entries = tuple(entries)
        self._hash = hash(self._entries)

    def __hash__(self) -> int:
        return self._hash

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Key) and self._entries == other._entries


@final
class Held:
    """What a function held when it was looked into."""

    def __init__(self, function: Any, names: frozenset[str]) -> None:
        self.function = function
        self.names = names  # all that its functions name
        self.key = Key(())
        self.backward_hooks: list[str] = []  # of which modules
        self._rows: list[Reader] = []  # parameters and buffers of modules, None among them
        self._row_labels: list[str] = []
        self._loose: list[Reader] = []  # other tensors
        self._loose_labels: list[str] = []
        self._empty: list[Any] = []
        self._empty_labels: list[str] = []
        self._sized: list[Any] = []
        self._sizes: list[int] = []
        self._sized_labels: list[str] = []
        self._dicts: list[dict[Any, Any]] = []  # each as often as there are keys of it
        self._keys: list[Any] = []
        self._values: list[Any] = []
        self._value_labels: list[str] = []
        self._readers: list[Reader] = []  # of what is in no dict
        self._seen: list[Any] = []
        self._labels: list[str] = []
        self._sets: list[tuple[Any, frozenset[Any], str]] = []

    def tensors(self) -> Iterable[Any]:
        """The tensors it holds now, in order; None where a module has none."""
        return chain.from_iterable(map(call, chain(self._rows, self._loose)))

    def has_tensors(self) -> bool:
        """Whether it holds any."""
        return bool(self._rows or self._loose)

    def still(self) -> bool:
        """Whether the function holds the very same objects, tensors apart."""
        if any(self._empty) or (self._sized and [*map(len, self._sized)] != self._sizes):
            return False
        if not all(map(is_, map(dict.get, self._dicts, self._keys), self._values)):
            return False
        if self._seen and not all(map(is_, chain.from_iterable(map(call, self._readers)), self._seen)):
            return False
        for read in self._loose:
            for value in read():
                if not isinstance(value, Tensor):
                    return False
        return not self._sets or all(now == before for now, before, _ in self._sets)

    def labels(self) -> Sequence[str]:
        """The names of its tensors."""
        return *self._row_labels, *self._loose_labels

    def changed(self) -> str:
        """What is not as it was, by name."""
        for now, label in zip(self._empty, self._empty_labels, strict=True):
            if now:
                return _grown(now, label)
        for now, size, label in zip(self._sized, self._sizes, self._sized_labels, strict=True):
            if len(now) != size:
                return _grown(now, label) if len(now) > size else label
        for value, label in zip(chain.from_iterable(map(call, self._loose)), self._loose_labels, strict=True):
            if not isinstance(value, Tensor):
                return label
        each = chain(map(dict.get, self._dicts, self._keys), chain.from_iterable(map(call, self._readers)))
        seen, labels = chain(self._values, self._seen), chain(self._value_labels, self._labels)
        for value, before, label in zip(each, seen, labels, strict=True):
            if value is not before and (plain(value) is None or plain(value) != plain(before)):
                return label
        for value, items, label in self._sets:
            if value != items:
                return label
        return "something that it names"

    # --- noting, while it is looked into ----------------------------------------------------------------------------

    def note_size(self, container: Any, label: str) -> None:
        """The container is to keep its number of items."""
        if len(container):
            self._sized.append(container)
            self._sizes.append(len(container))
            self._sized_labels.append(label)
        else:
            self._empty.append(container)
            self._empty_labels.append(label)

    def note(
        self,
        source: dict[Any, Any] | Callable[[Any], Any],
        places: Sequence[Any],
        values: Sequence[Any],
        labels: Sequence[str],
    ) -> None:
        """These values are to be in these places of a dict, or to be returned for them."""
        if isinstance(source, dict):
            self._dicts += [source] * len(places)
            self._keys += places
            self._values += values
            self._value_labels += labels
        else:
            self._note(partial(map, source, places), values, labels)

    def note_keys(self, container: dict[Any, Any], labels: Sequence[str]) -> None:
        """The dict is to keep its keys, in their order."""
        self._note(container.__iter__, tuple(container), labels)

    def _note(self, read: Reader, values: Sequence[Any], labels: Sequence[str]) -> None:
        self._readers.append(read)
        self._seen += values
        self._labels += labels

    def note_row(self, row: dict[str, Any], labels: Sequence[str]) -> None:
        """All tensors of a dict are inputs."""
        self.note_keys(row, labels)
        self._rows.append(row.values)
        self._row_labels += labels

    def note_tensors(self, read: Reader, labels: Sequence[str]) -> None:
        """These tensors are inputs."""
        self._loose.append(read)
        self._loose_labels += labels

    def note_set(self, value: Any, label: str) -> None:
        """The set is to keep its items."""
        self._sets.append((value, frozenset(value), label))


@final
class Itself:
    """An object that counts by identity."""

    __slots__ = ("value",)

    def __init__(self, value: Any) -> None:
        self.value = value

    def __hash__(self) -> int:
        return id(self.value)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Itself) and self.value is other.value


def plain(value: Any) -> tuple[Any, ...] | None:
    """A value to be compared by; None where the value is no plain one."""
    if isinstance(value, _PLAIN):
        return (type(value), value)
    if isinstance(value, float):
        return (type(value), value.hex())  # tells -0.0 from 0.0, and takes nan for itself
    if isinstance(value, complex):
        return (type(value), value.real.hex(), value.imag.hex())
    return None


def _grown(container: Any, label: str) -> str:
    """What was added to a container, as far as that can be told."""
    last = next(reversed(container)) if isinstance(container, dict) else None
    return f"{label}.{last}" if isinstance(last, str) else label
