"""What is asked for against what is stored: everything that does not fit is found before the first byte moves. Pure.

A target is found by the keys that lead to it; where those differ (a list for a dict, "a.b" for "a" and "b"), by its
dotted name, if that is unique.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from fnmatch import fnmatchcase
from typing import Any, Literal, NamedTuple, TypeAlias

import torch

from shardwright.checkpoint.flatten import Branch, Coded, Flat, Node, Object, OfRank, TensorNode, ValueNode
from shardwright.checkpoint.leaves import Leaf
from shardwright.checkpoint.stored import StoredEntry, StoredTensor, StoredValue
from shardwright.checkpoint.tensors import TensorTable
from shardwright.checkpoint.values import DTYPES
from shardwright.errors import ArgumentTypeError

__all__ = ["Cast", "Match", "OnMissing", "Rename", "Wanted", "match_state", "renamed"]

Rename: TypeAlias = Mapping[str, str] | Callable[[str], str]
Cast: TypeAlias = bool | Mapping[str, bool]
OnMissing: TypeAlias = Literal["raise", "keep"] | Callable[[str], Literal["raise", "keep"]]


class Wanted(NamedTuple):
    """A leaf of the target and the stored tensor that fills it."""

    name: str
    leaf: Leaf
    number: int


class Match(NamedTuple):
    """What fills what, and what does not fit, as this rank sees it.

    `values` are the plain values to be put in, by the id of their nodes. `missing` are the names of the target that
    the checkpoint does not have. `unexpected` are the places, among all that is stored, of what this rank does not ask
    for; another may. `idle` are patterns of `only` that fit no name here. `faults` are complete sentences.
    """

    tensors: list[Wanted]
    values: dict[int, Any]
    missing: list[str]
    unexpected: list[int]
    idle: list[str]
    faults: list[str]


def renamed(stored: Sequence[StoredEntry], rename: Rename | None) -> tuple[list[StoredEntry], list[str]]:
    """What is stored, under the names that `rename` gives it, and what is wrong with those.

    What has a new name is found by that alone.
    """
    if rename is None:
        return list(stored), []
    if not (callable(rename) or isinstance(rename, Mapping)):
        raise ArgumentTypeError(f"rename is a {type(rename).__name__}: give a function or a mapping of names")
    found: list[StoredEntry] = []
    faults: list[str] = []
    taken: dict[str, str] = {}
    if isinstance(rename, Mapping):
        strangers = rename.keys() - {entry.name for entry in stored}
        faults = [f"rename: the checkpoint has no {name!r}" for name in sorted(map(str, strangers))]
    for entry in stored:
        new = rename(entry.name) if callable(rename) else rename.get(entry.name, entry.name)
        if not isinstance(new, str):
            raise ArgumentTypeError(f"rename gives {new!r} for {entry.name!r}: a name is text")
        other = taken.setdefault(new, entry.name)
        if other != entry.name:
            faults.append(f"rename: {other!r} and {entry.name!r} both become {new!r}")
        found.append(entry if new == entry.name else entry._replace(name=new, keys=None))
    return found, faults


def match_state(
    flat: Flat,
    stored: Sequence[StoredEntry],
    table: TensorTable,
    *,
    strict: bool = True,
    only: str | Sequence[str] | None = None,
    cast: Cast = False,
    on_missing: OnMissing = "raise",
    faults: Sequence[str] = (),
) -> Match:
    """What fills what; `faults` are known already. It changes nothing and raises only for arguments of a wrong kind."""
    found = Match([], {}, [], [], [], list(faults))
    nodes = list(_leaf_nodes(flat.root, flat))
    wanted = nodes if only is None else _chosen(nodes, only, found.idle)
    index = _Index(stored)
    used: set[int] = set()
    read: dict[tuple[Any, ...], tuple[str, int]] = {}  # memory that is to be filled: under which name, with what
    for node, leaf in wanted:
        place = index.find(node)
        if place is None:
            if _is_missed(node.name, on_missing):
                found.missing.append(node.name)
            continue
        used.add(place)
        entry = stored[place].what
        if leaf is None:
            _take_value(found, node, entry)
        elif isinstance(entry, StoredValue):
            found.faults.append(f"kind: {node.name!r} is a tensor here, and {_shown(entry.value)} in the checkpoint")
        else:
            found.faults.extend(_compare(node, leaf, entry.number, table, cast))
            first = None if not leaf.is_held else read.setdefault(leaf.identity, (node.name, entry.number))
            if first is None or first == (node.name, entry.number):
                found.tensors.append(Wanted(node.name, leaf, entry.number))
            elif first[1] != entry.number and strict:
                found.faults.append(
                    f"tied: {first[0]!r} and {node.name!r} are one memory here, and two tensors in the checkpoint; "
                    "untie them, choose one with only=, or take the first with strict=False"
                )
    branches = {branch.name: branch for branch in _branches(flat.root)}
    for place, one in enumerate(stored):
        branch = branches.get(one.name)
        if place in used or isinstance(one.what, StoredTensor) or branch is None:
            continue
        used.add(place)  # a container is there to receive it: an empty one is no mismatch, anything else is
        if only is None and not isinstance(one.what.value, dict | list | tuple):
            found.faults.append(
                f"kind: {one.name!r} is a container here, and {_shown(one.what.value)} in the checkpoint"
            )
    if strict and only is None:
        for place in (place for place in range(len(stored)) if place not in used):
            if stored[place].of_rank:  # no other rank could ask for it
                found.faults.append(f"unexpected: {stored[place].name!r} is in the checkpoint and not in the state")
            else:
                found.unexpected.append(place)
    return found


class _Index:
    """What is stored, to be found by keys or by name."""

    def __init__(self, stored: Sequence[StoredEntry]) -> None:
        self._by_keys = {entry.keys: place for place, entry in enumerate(stored) if entry.keys is not None}
        self._by_name: dict[str, int] = {}
        for place, entry in enumerate(stored):
            self._by_name[entry.name] = -1 if entry.name in self._by_name else place

    def find(self, node: TensorNode | ValueNode) -> int | None:
        place = self._by_keys.get(node.keys)
        if place is None:
            place = self._by_name.get(node.name)
        return None if place == -1 else place


class _Found(NamedTuple):
    """A leaf of the target: its node, and what it is if it is a tensor."""

    node: TensorNode | ValueNode
    leaf: Leaf | None


def _leaf_nodes(node: Node, flat: Flat) -> Iterator[_Found]:
    match node:
        case TensorNode():
            yield _Found(node, flat.leaves[node.number])
        case ValueNode():
            yield _Found(node, None)
        case Branch():
            for child in node.children:
                yield from _leaf_nodes(child, flat)
        case Object() | Coded():
            yield from _leaf_nodes(node.inner, flat)
        case OfRank():
            yield from _leaf_nodes(node.flat.root, node.flat)


def _branches(node: Node) -> Iterator[Branch]:
    match node:
        case Branch():
            yield node
            for child in node.children:
                yield from _branches(child)
        case Object() | Coded():
            yield from _branches(node.inner)
        case OfRank():
            yield from _branches(node.flat.root)


def _chosen(nodes: Sequence[_Found], only: str | Sequence[str], idle: list[str]) -> list[_Found]:
    patterns = [only] if isinstance(only, str) else list(only)
    waiting = dict.fromkeys(patterns)
    chosen = []
    for one in nodes:
        fitting = [pattern for pattern in patterns if fnmatchcase(one.node.name, pattern)]
        for pattern in fitting:
            waiting.pop(pattern, None)
        chosen += [one] if fitting else []
    idle += waiting
    return chosen


def _is_missed(name: str, on_missing: OnMissing) -> bool:
    said = on_missing(name) if callable(on_missing) else on_missing
    if said not in ("raise", "keep"):
        raise ArgumentTypeError(
            f"on_missing says {said!r} of {name!r}: it is 'raise' or 'keep', or a function to these"
        )
    return said == "raise"


def _take_value(found: Match, node: TensorNode | ValueNode, entry: StoredTensor | StoredValue) -> None:
    if isinstance(entry, StoredTensor):
        found.faults.append(f"kind: {node.name!r} is {_shown(node.original)} here, and a tensor in the checkpoint")
    elif isinstance(entry.value, dict | list | tuple):
        what = f"an empty {type(entry.value).__name__}"
        found.faults.append(f"kind: {node.name!r} is {_shown(node.original)} here, and {what} in the checkpoint")
    else:
        found.values[id(node)] = entry.value


def _compare(node: TensorNode | ValueNode, leaf: Leaf, number: int, table: TensorTable, cast: Cast) -> Iterator[str]:
    here, there = leaf.placing.shape, table.shape(number)
    name = node.name
    if here != there:
        yield f"shape: {name!r} is {list(here)} here, and {list(there)} in the checkpoint"
    stored = table.dtypes[number]
    if leaf.dtype != stored:
        both = f"dtype: {name!r} is {leaf.dtype} here, and {stored} in the checkpoint"
        if not _is_cast(name, cast):
            yield f"{both}; cast=True converts it"
        elif DTYPES[stored].is_complex and not DTYPES[leaf.dtype].is_complex:
            yield f"{both}: a cast would lose its imaginary part"
    if isinstance(node, TensorNode) and node.is_array and not node.original.flags.writeable:
        yield f"memory: {name!r} is a read-only array: give a copy of it"
    for part in leaf.parts:
        if not part.tensor.is_contiguous() and torch._debug_has_internal_overlap(part.tensor) == 1:
            yield (
                f"memory: {name!r} has strides {list(part.tensor.stride())}, so several of its elements are one: "
                "give a contiguous() copy of it"
            )


def _is_cast(name: str, cast: Cast) -> bool:
    if isinstance(cast, Mapping):
        return next((bool(said) for pattern, said in cast.items() if fnmatchcase(name, pattern)), False)
    return bool(cast)


def _shown(value: Any) -> str:
    shown = repr(value)
    return shown if len(shown) < 60 else shown[:57] + "..."
