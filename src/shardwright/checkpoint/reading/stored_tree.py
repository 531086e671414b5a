"""What is stored under an object, as a tree again: to make in a state what it does not have yet.

Containers come back as what they were; only names that are asked for are made, and a list is made whole or not at all.
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
"""What stands for nothing."""

Make: TypeAlias = Callable[[StoredEntry, int], Any]


class RelativeEntry(NamedTuple):
    """An entry, with the keys that lead to it from the object it lies under, and what each is a key of."""

    keys: Keys
    within: str
    entry: StoredEntry

    def below(self, count: int) -> RelativeEntry:
        """The same from so many keys further down."""
        return RelativeEntry(self.keys[count:], self.within[count:], self.entry)

    @property
    def has_codec(self) -> bool:
        """Whether a codec made what lies between the object and it."""
        return any(depth > len(self.entry.path) - len(self.keys) for depth, _ in self.entry.codecs)


class StoredTree(NamedTuple):
    """A container of the stored tree, or with an entry and no children, a leaf."""

    kind: str
    children: dict[Any, StoredTree]
    leaf: RelativeEntry | None


def entries_under(stored: Iterable[StoredEntry], name: str, keys: Keys) -> Iterator[RelativeEntry]:
    """What is stored under a name, or under the keys that lead there."""
    begin, depth = prefix(name), len(keys)
    for entry in stored:
        if entry.keys is not None and len(entry.keys) > depth and entry.keys[:depth] == keys:
            yield RelativeEntry(entry.keys[depth:], entry.within[depth:], entry)
        elif entry.name.startswith(begin) and entry.name != name:
            yield relative_entry(entry, entry.name[len(begin) :])


def relative_entry(entry: StoredEntry, text: str) -> RelativeEntry:
    """The last of an entry's keys, as many as this text is; where it is none of them, it is one key."""
    for count in range(1, len(entry.path) + 1):
        if ".".join(map(str, entry.path[-count:])) == text:
            return RelativeEntry(entry.path[-count:], entry.within[-count:], entry)
    return RelativeEntry((text,), "d", entry)


def build_tree(entries: Iterable[RelativeEntry]) -> StoredTree:
    """The tree of these entries. One of no keys is a leaf by itself."""
    root = StoredTree("d", {}, None)
    for one in entries:
        if not one.keys:
            return StoredTree("", {}, one)
        at = root
        for place, key in enumerate(one.keys):
            if place + 1 < len(one.keys):
                at = at.children.setdefault(key, StoredTree(one.within[place + 1], {}, None))
            else:
                at.children[key] = StoredTree("", {}, one)
        if one.within[0] != root.kind:
            root = root._replace(kind=one.within[0])
    return root


def value_of(tree: StoredTree, make: Make) -> Any:
    """The value of a tree, with what `make` gives for a leaf and the number of keys above it; ABSENT if it is none.

    A list that lacks an entry would have the others at wrong places: it is left out.
    """
    if tree.leaf is not None:
        return make(tree.leaf.entry, len(tree.leaf.keys))
    items = {key: value for key, one in tree.children.items() if (value := value_of(one, make)) is not ABSENT}
    if tree.kind == "d":
        return items if items else ABSENT
    if sorted(items) != list(range(len(tree.children))):
        return ABSENT
    values = [items[place] for place in range(len(items))]
    return tuple(values) if tree.kind == "t" else values


def add_missing(present: Any, stored: Iterable[RelativeEntry], make: Make) -> Any:
    """A state with what is stored and not in it. It is not changed itself; it is returned where nothing is new.

    Its lists have the stored length. What it has besides stays, to be told as missing.
    """
    known = set(_names(present, ""))
    new = [one for one in stored if _has(present, one.keys) or ".".join(map(str, one.keys)) not in known]
    return _add_missing(present, build_tree(new), make) if new else present


def _add_missing(present: Any, tree: StoredTree, make: Make) -> Any:
    if isinstance(present, PerRank):
        value = _add_missing(present.value, tree, lambda entry, depth: make(entry._replace(of_rank=False), depth))
        return present if value is present.value else PerRank(value)
    if present is ABSENT or (present is None and not _is_value(tree)):
        made = value_of(tree, make)
        return present if made is ABSENT else made
    if tree.leaf is not None:
        is_emptied = isinstance(present, list) and _is_empty(tree.leaf.entry)
        if is_emptied and present:
            made = value_of(tree, make)
            return present if made is ABSENT else made
        return present
    if isinstance(present, Mapping) and tree.kind == "d":
        return _add_to_mapping(present, tree, make)
    if isinstance(present, list | tuple) and tree.kind == ("t" if isinstance(present, tuple) else "l"):
        return _add_to_sequence(present, tree, make)
    if isinstance(present, Mapping | list | tuple) and not present:
        made = value_of(tree, make)
        return present if made is ABSENT else made
    return present


def _add_to_mapping(present: Mapping[Any, Any], tree: StoredTree, make: Make) -> Any:
    new = {key: _add_missing(present.get(key, ABSENT), one, make) for key, one in tree.children.items()}
    new = {key: value for key, value in new.items() if value is not present.get(key, ABSENT) and value is not ABSENT}
    if not new:
        return present
    made = copy.copy(present) if isinstance(present, MutableMapping) else dict(present)
    made.update(new)
    return made


def _add_to_sequence(present: Any, tree: StoredTree, make: Make) -> Any:
    count = len(tree.children)
    if sorted(tree.children) != list(range(count)):
        return present
    items = [
        _add_missing(present[place] if place < len(present) else ABSENT, tree.children[place], make)
        for place in range(count)
    ]
    if any(item is ABSENT for item in items):
        return present
    if len(items) == len(present) and all(new is old for new, old in zip(items, present, strict=True)):
        return present
    if isinstance(present, tuple):
        return type(present)(*items) if hasattr(present, "_fields") else tuple(items)
    return items


def _is_empty(entry: StoredEntry) -> bool:
    return not isinstance(entry.what, StoredTensor) and entry.what.value == []


def _is_value(tree: StoredTree) -> bool:
    """Whether it is a plain value, which takes the place of any other."""
    if tree.leaf is None or isinstance(tree.leaf.entry.what, StoredTensor):
        return False
    return not isinstance(tree.leaf.entry.what.value, dict | list | tuple)


def _children(value: Any) -> Iterator[tuple[Any, Any]]:
    if isinstance(value, PerRank):
        yield from _children(value.value)
    elif isinstance(value, Mapping):
        yield from value.items()
    elif isinstance(value, list | tuple):
        yield from enumerate(value)


def _names(value: Any, name: str) -> Iterator[str]:
    """The dotted names of its leaves."""
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
        for known, child in _children(value):
            if type(known) is type(key) and known == key:
                value = child
                break
        else:
            return False
    return True


def plain(value: Any) -> Any:
    """A stored value as a state has it; an empty container is a new one."""
    return value.value if isinstance(value, EnumValue) else copy.copy(value)
