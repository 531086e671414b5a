"""The stored entries under an object as a tree, to create what a state does not have yet.

Containers are restored as they were; only selected names are created, and a list is created in full or not at all.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Iterator, Mapping, MutableMapping
from typing import Any, NamedTuple, TypeAlias

import numpy as np
from torch import Tensor

from shardwright.checkpoint.format.names import joined, prefix
from shardwright.checkpoint.format.tree import StoredEntry, StoredTensor
from shardwright.checkpoint.format.values import EnumValue
from shardwright.checkpoint.state.flatten import Keys
from shardwright.checkpoint.state.marks import PerRank

__all__ = [
    "ABSENT",
    "RelativeEntry",
    "StoredTree",
    "add_missing",
    "build_tree",
    "entries_under",
    "plain",
    "relative_entry",
    "value_of",
]

ABSENT: Any = object()
"""Sentinel for 'no value'."""

Make: TypeAlias = Callable[[StoredEntry, int], Any]


class RelativeEntry(NamedTuple):
    """A stored entry relative to an object: the keys that lead to it, and the kind of container of each."""

    keys: Keys
    within: str
    entry: StoredEntry

    def below(self, count: int) -> RelativeEntry:
        """Return the entry relative to a container this many keys below."""
        return RelativeEntry(self.keys[count:], self.within[count:], self.entry)

    @property
    def has_codec(self) -> bool:
        """True if a codec stored a container between the object and the entry."""
        return any(depth > len(self.entry.path) - len(self.keys) for depth, _ in self.entry.codecs)


class StoredTree(NamedTuple):
    """A container of the stored tree, or a leaf (with an entry and no children)."""

    kind: str
    children: dict[Any, StoredTree]
    leaf: RelativeEntry | None


def entries_under(stored: Iterable[StoredEntry], name: str, keys: Keys) -> Iterator[RelativeEntry]:
    """Yield the entries stored under a name, or under the keys that lead there."""
    begin, depth = prefix(name), len(keys)
    for entry in stored:
        if entry.keys is not None and len(entry.keys) > depth and entry.keys[:depth] == keys:
            yield RelativeEntry(entry.keys[depth:], entry.within[depth:], entry)
        elif entry.name.startswith(begin) and entry.name != name:
            yield relative_entry(entry, entry.name[len(begin) :])


def relative_entry(entry: StoredEntry, text: str) -> RelativeEntry:
    """Return the trailing keys that this dotted text spells; the whole text as one key if it spells none."""
    for count in range(1, len(entry.path) + 1):
        if ".".join(map(str, entry.path[-count:])) == text:
            return RelativeEntry(entry.path[-count:], entry.within[-count:], entry)
    return RelativeEntry((text,), "d", entry)


def build_tree(entries: Iterable[RelativeEntry]) -> StoredTree:
    """Build the tree of these entries. An entry without keys is a leaf."""
    root = StoredTree("d", {}, None)
    for relative in entries:
        if not relative.keys:
            return StoredTree("", {}, relative)
        at = root
        for index, key in enumerate(relative.keys):
            if index + 1 < len(relative.keys):
                at = at.children.setdefault(key, StoredTree(relative.within[index + 1], {}, None))
            else:
                at.children[key] = StoredTree("", {}, relative)
        if relative.within[0] != root.kind:
            root = root._replace(kind=relative.within[0])
    return root


def value_of(tree: StoredTree, make: Make) -> Any:
    """Return the value of a tree, with `make(entry, depth)` for its leaves; ABSENT if there is none.

    A list that lacks an entry would have the others at wrong indices: it is left out.
    """
    if tree.leaf is not None:
        return make(tree.leaf.entry, len(tree.leaf.keys))
    items = {key: value for key, child in tree.children.items() if (value := value_of(child, make)) is not ABSENT}
    if tree.kind == "d":
        return items if items else ABSENT
    if sorted(items) != list(range(len(tree.children))):
        return ABSENT
    values = [items[index] for index in range(len(items))]
    return tuple(values) if tree.kind == "t" else values


def add_missing(present: Any, stored: Iterable[RelativeEntry], make: Make) -> Any:
    """Return a state with the stored entries that it does not have; the state itself, unchanged, if there are none.

    Its lists get the stored length. What is not stored stays, and is reported as missing.
    """
    names = set(_names(present, ""))
    new = [
        relative
        for relative in stored
        if _has(present, relative.keys) or ".".join(map(str, relative.keys)) not in names
    ]
    return _add_missing(present, build_tree(new), make) if new else present


def _add_missing(present: Any, tree: StoredTree, make: Make) -> Any:
    if isinstance(present, PerRank):
        value = _add_missing(present.value, tree, lambda entry, depth: make(entry._replace(of_rank=False), depth))
        return present if value is present.value else PerRank(value)
    if present is ABSENT or (present is None and not _is_value(tree)):
        created = value_of(tree, make)
        return present if created is ABSENT else created
    if tree.leaf is not None:
        is_emptied = isinstance(present, list) and _is_empty(tree.leaf.entry)
        if is_emptied and present:
            created = value_of(tree, make)
            return present if created is ABSENT else created
        return present
    if isinstance(present, Mapping) and tree.kind == "d":
        return _add_to_mapping(present, tree, make)
    if isinstance(present, list | tuple) and tree.kind == ("t" if isinstance(present, tuple) else "l"):
        return _add_to_sequence(present, tree, make)
    if isinstance(present, Mapping | list | tuple) and not present:
        created = value_of(tree, make)
        return present if created is ABSENT else created
    return present


def _add_to_mapping(present: Mapping[Any, Any], tree: StoredTree, make: Make) -> Any:
    new = {key: _add_missing(present.get(key, ABSENT), child, make) for key, child in tree.children.items()}
    new = {key: value for key, value in new.items() if value is not present.get(key, ABSENT) and value is not ABSENT}
    if not new:
        return present
    result = copy.copy(present) if isinstance(present, MutableMapping) else dict(present)
    result.update(new)
    return result


def _add_to_sequence(present: Any, tree: StoredTree, make: Make) -> Any:
    count = len(tree.children)
    if sorted(tree.children) != list(range(count)):
        return present
    items = [
        _add_missing(present[index] if index < len(present) else ABSENT, tree.children[index], make)
        for index in range(count)
    ]
    if any(item is ABSENT for item in items):
        return present
    if len(items) == len(present) and all(new is old for new, old in zip(items, present, strict=True)):
        return present
    if isinstance(present, tuple):
        return type(present)(*items) if hasattr(present, "_fields") else tuple(items)
    return items


def _is_empty(entry: StoredEntry) -> bool:
    return not isinstance(entry.content, StoredTensor) and entry.content.value == []


def _is_value(tree: StoredTree) -> bool:
    """Return True for a plain value, which replaces any other."""
    if tree.leaf is None or isinstance(tree.leaf.entry.content, StoredTensor):
        return False
    return not isinstance(tree.leaf.entry.content.value, dict | list | tuple)


def _children(value: Any) -> Iterator[tuple[Any, Any]]:
    if isinstance(value, PerRank):
        yield from _children(value.value)
    elif isinstance(value, Mapping):
        yield from value.items()
    elif isinstance(value, list | tuple):
        yield from enumerate(value)


def _names(value: Any, name: str) -> Iterator[str]:
    """Yield the dotted names of the leaves."""
    if isinstance(value, PerRank):
        yield from _names(value.value, name)
    elif isinstance(value, Mapping | list | tuple):
        for key, child in _children(value):
            yield from _names(child, joined(name, key))
    else:
        yield name


def _has(value: Any, keys: Keys) -> bool:
    for key in keys:
        if isinstance(value, Tensor | np.ndarray):
            return False
        for child_key, child in _children(value):
            if type(child_key) is type(key) and child_key == key:
                value = child
                break
        else:
            return False
    return True


def plain(value: Any) -> Any:
    """Return a stored value as a state holds it; empty containers are copied."""
    return value.value if isinstance(value, EnumValue) else copy.copy(value)
