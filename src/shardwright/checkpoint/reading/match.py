"""What is asked for against what is stored: everything that does not fit is found before the first byte moves.

A target is found by the keys that lead to it; where those differ (a list for a dict, "a.b" for "a" and "b"), by its
dotted name, if that is unique.
"""

from __future__ import annotations

import enum
from collections.abc import Container, Iterator, Mapping, Sequence
from fnmatch import fnmatchcase
from functools import cached_property
from operator import is_
from typing import Any, NamedTuple, TypeAlias

import numpy as np
from torch import Tensor

from shardwright.checkpoint.format.tensor_table import TensorTable
from shardwright.checkpoint.format.tree import StoredEntry, StoredTensor, StoredValue, values_of_other_ranks
from shardwright.checkpoint.format.values import DTYPES, EnumValue
from shardwright.checkpoint.reading.patterns import fits, patterns_of
from shardwright.checkpoint.reading.request import Cast, LoadRequest, OnMissing, Rename
from shardwright.checkpoint.state.flatten import (
    CodecNode,
    ContainerNode,
    FlatState,
    Keys,
    Node,
    ObjectNode,
    PerRankNode,
    TensorNode,
    ValueNode,
)
from shardwright.checkpoint.state.leaves import Leaf, Part
from shardwright.errors import ArgumentTypeError
from shardwright.tensor.api.tracked_copy import TrackedCopy

__all__ = [
    "Match",
    "TensorMatch",
    "match_state",
    "matched_entries",
    "rename_entries",
    "unclaimed_rank_values",
]

_MAX_WORK = 100_000  # for telling whether two tensors share memory: beyond it they are taken to


class TensorMatch(NamedTuple):
    """A leaf of the target and the stored tensor that fills it."""

    name: str
    leaf: Leaf
    number: int


class Match(NamedTuple):
    """What fills what, and what does not fit, as this rank sees it.

    `values` are the plain values to be put in, by the id of their nodes. `missing` are the names of the target that
    the checkpoint does not have. `emptied` are the ids of containers that are empty in the checkpoint. `unexpected` are
    the places, among all that is stored, of what this rank does not ask for; another may. `idle` are patterns of `only`
    that fit no name here. `faults` are complete sentences.
    """

    tensors: list[TensorMatch]
    values: dict[int, Any]
    missing: list[str]
    unexpected: list[int]
    idle: list[str]
    faults: list[str]
    emptied: set[int]


def unclaimed_rank_values(tree: Any, ranks: Sequence[int]) -> list[str]:
    """What is wrong if all that ranks had for themselves is to be loaded, and some of them are not here."""
    return [
        f"unexpected: {name!r} of rank {owner} is in the checkpoint, and no rank {owner} loads it; "
        "strict=False leaves it out"
        for name, owner in values_of_other_ranks(tree, frozenset(ranks))
    ]


def rename_entries(stored: Sequence[StoredEntry], rename: Rename | None) -> tuple[list[StoredEntry], list[str]]:
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
    flat: FlatState,
    stored: Sequence[StoredEntry],
    table: TensorTable,
    request: LoadRequest,
    *,
    faults: Sequence[str] = (),
    created: Container[Any] = (),
) -> Match:
    """What fills what; `faults` are known already. It changes nothing and raises only for arguments of a wrong kind.

    `created` has what has no contents of its own: it is never kept as it is.
    """
    found = Match([], {}, [], [], [], list(faults), set())
    nodes = _leaf_nodes(flat)
    patterns = patterns_of(request.only)
    wanted = nodes if patterns is None else _chosen(nodes, patterns, found.idle)
    index = _Index(stored, nodes)
    fit = _Fit(table, request.cast)
    used: set[int] = set()
    read: dict[tuple[Any, ...], TensorMatch] = {}  # memory that is to be filled, and what with
    for node, leaf, codecs in wanted:
        place = index.find(node)
        if place is None:
            if node.original in created or _is_missed(node.name, request.on_missing):
                found.missing.append(node.name)
            continue
        if place in used:
            found.faults.append(
                f"twice: two places of the state have the name {node.name!r}, and the checkpoint has it once, under "
                "other keys; rename one of them"
            )
            continue
        used.add(place)
        one = stored[place]
        if codecs:
            found.faults.extend(_other_codec(node.name, codecs, [name for _, name in one.codecs]))
        entry = one.what
        if leaf is None:
            _take_value(found, node, entry)
        elif isinstance(entry, StoredValue):
            found.faults.append(f"kind: {node.name!r} is a tensor here, and {_shown(entry.value)} in the checkpoint")
        else:
            if not fit.is_plain(node, leaf, entry.number):
                found.faults.extend(fit.faults(node, leaf, entry.number))
            wish = TensorMatch(node.name, leaf, entry.number)
            first = read.setdefault(leaf.identity, wish) if leaf.is_held else wish
            if first is wish:
                found.tensors.append(wish)
            elif first.number != entry.number and request.strict:
                found.faults.append(
                    f"tied: {first.name!r} and {node.name!r} are one memory here, and two tensors in the checkpoint; "
                    "untie them, choose one with only=, or take the first with strict=False"
                )
    found.faults.extend(_overlaps(found.tensors))
    left = [place for place in range(len(stored)) if place not in used]
    branches = {branch.name: branch for branch in _branches(flat.root)} if left else {}
    for place in left:
        one = stored[place]
        branch = branches.get(one.name)
        if isinstance(one.what, StoredTensor) or branch is None:
            continue
        used.add(place)  # a container is there to receive it: an empty one is no mismatch, anything else is
        if patterns is None or fits(one.name, patterns):
            found.emptied.add(id(branch))
        if request.only is None and not isinstance(one.what.value, dict | list | tuple):
            found.faults.append(
                f"kind: {one.name!r} is a container here, and {_shown(one.what.value)} in the checkpoint"
            )
    if request.strict and request.only is None:
        for place in (place for place in left if place not in used):
            if stored[place].of_rank:  # no other rank could ask for it
                found.faults.append(f"unexpected: {stored[place].name!r} is in the checkpoint and not in the state")
            else:
                found.unexpected.append(place)
    return found


def matched_entries(flat: FlatState, stored: Sequence[StoredEntry]) -> set[int]:
    """The places, among all that is stored, of what this state asks for."""
    nodes = _leaf_nodes(flat)
    index = _Index(stored, nodes)
    return {place for node, *_ in nodes if (place := index.find(node)) is not None}


class _Index:
    """What is stored, to be found by keys or by name."""

    def __init__(self, stored: Sequence[StoredEntry], nodes: Sequence[_Found]) -> None:
        self._stored, self._nodes = stored, nodes
        self._by_keys = {entry.keys: place for place, entry in enumerate(stored) if entry.keys is not None}

    @cached_property
    def _by_name(self) -> dict[str, int]:
        """The places of what is stored; -1 for a name that comes twice."""
        found: dict[str, int] = {}
        for place, entry in enumerate(self._stored):
            found[entry.name] = -1 if entry.name in found else place
        return found

    @cached_property
    def _taken(self) -> set[int]:
        """What is somebody's by its keys."""
        return {at for node, *_ in self._nodes if (at := self._with_keys(node.keys)) is not None}

    def find(self, node: TensorNode | ValueNode) -> int | None:
        """By keys; else by name, if that is of one entry only, and of one that is not another's by its keys."""
        place = self._with_keys(node.keys)
        if place is not None:
            return place
        named = self._by_name.get(node.name)
        return None if named == -1 or named in self._taken else named

    def _with_keys(self, keys: Keys) -> int | None:
        place = self._by_keys.get(keys)
        if place is None or not all(map(is_, map(type, keys), map(type, self._stored[place].path))):  # True is no 1
            return None
        return place


_Found: TypeAlias = tuple[TensorNode | ValueNode, Leaf | None, tuple[str, ...]]
"""A leaf of the target: its node, what it is if it is a tensor, and the codecs that read what is above it."""


def _leaf_nodes(flat: FlatState) -> list[_Found]:
    found: list[_Found] = []
    _add_leaf_nodes(flat.root, flat, (), found)
    return found


def _add_leaf_nodes(node: Node, flat: FlatState, codecs: tuple[str, ...], found: list[_Found]) -> None:
    match node:
        case TensorNode():
            found.append((node, flat.leaves[node.number], codecs))
        case ValueNode():
            found.append((node, None, codecs))
        case ContainerNode():
            for child in node.children:
                _add_leaf_nodes(child, flat, codecs, found)
        case ObjectNode():
            _add_leaf_nodes(node.inner, flat, codecs, found)
        case CodecNode():
            _add_leaf_nodes(node.inner, flat, (*codecs, node.codec.name), found)
        case PerRankNode():
            _add_leaf_nodes(node.flat.root, node.flat, codecs, found)


def _branches(node: Node) -> Iterator[ContainerNode]:
    match node:
        case ContainerNode():
            yield node
            for child in node.children:
                yield from _branches(child)
        case ObjectNode() | CodecNode():
            yield from _branches(node.inner)
        case PerRankNode():
            yield from _branches(node.flat.root)


def _chosen(nodes: Sequence[_Found], patterns: Sequence[str], idle: list[str]) -> list[_Found]:
    waiting = dict.fromkeys(patterns)
    chosen = []
    for one in nodes:
        fitting = [pattern for pattern in patterns if fnmatchcase(one[0].name, pattern)]
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
    elif isinstance(entry.value, EnumValue) and isinstance(node.original, enum.Enum):
        kind = type(node.original)
        member = entry.value.of_type(kind)
        if member is None:
            what = f"{entry.value.type_name}.{entry.value.name} ({_shown(entry.value.value)})"
            found.faults.append(
                f"enum: {node.name!r} is {what} in the checkpoint, and no member of {kind.__name__} here"
            )
        found.values[id(node)] = member
    elif isinstance(entry.value, EnumValue):
        found.values[id(node)] = entry.value.value
    else:
        is_bytearray = isinstance(entry.value, bytes) and type(node.original) is bytearray
        found.values[id(node)] = bytearray(entry.value) if is_bytearray else entry.value


def _other_codec(name: str, here: Sequence[str], there: Sequence[str]) -> Iterator[str]:
    """What a codec stored, that codec reads. One may do without: what it stored is then given as it is."""
    if here and list(here) != list(there):
        one, other = (" in ".join(map(repr, names)) if names else "none" for names in (here, there))
        yield f"codec: {name!r} is read by codec {one} here, and was stored by {other}; give codecs= the same one"


class _Fit:
    """Whether stored tensors fit into those of the target."""

    def __init__(self, table: TensorTable, cast: Cast) -> None:
        self._table, self._cast = table, cast
        self._shapes = [sharding.shape for sharding in table.shardings]
        self._kinds: list[int] = table.kinds.tolist()

    def is_plain(self, node: TensorNode | ValueNode, leaf: Leaf, number: int) -> bool:
        """Whether it fits as it is, at first sight: what most tensors do."""
        return (
            leaf.dtype == self._table.dtypes[number]
            and leaf.sharding.shape == self._shapes[self._kinds[number]]
            and leaf.is_straight
            and isinstance(node, TensorNode)
            and not node.is_array
            and type(node.original) is not TrackedCopy
        )

    def faults(self, node: TensorNode | ValueNode, leaf: Leaf, number: int) -> Iterator[str]:
        """What is wrong if one is loaded into the other."""
        here, there = leaf.sharding.shape, self._table.shape(number)
        name = node.name
        if here != there:
            yield f"shape: {name!r} is {list(here)} here, and {list(there)} in the checkpoint"
        stored = self._table.dtypes[number]
        if leaf.dtype != stored:
            both = f"dtype: {name!r} is {leaf.dtype} here, and {stored} in the checkpoint"
            if not _is_cast(name, self._cast):
                yield f"{both}; cast=True converts it"
            elif DTYPES[stored].is_complex and not DTYPES[leaf.dtype].is_complex:
                yield f"{both}: a cast would lose its imaginary part"
        if isinstance(node, TensorNode) and node.is_array and not node.original.flags.writeable:
            yield f"memory: {name!r} is a read-only array: give a copy of it"
        if type(node.original) is TrackedCopy:
            yield (
                f"memory: {name!r} looks like a view of a DTensor but is a copy, which needed communication: what is "
                "loaded into it would not reach the original; give that, or a clone() of it"
            )
        for part in leaf.parts:
            if not part.tensor.is_contiguous() and _overlaps_itself(part.tensor):
                yield (
                    f"memory: {name!r} has strides {list(part.tensor.stride())}, so several of its elements are one: "
                    "give a contiguous() copy of it"
                )


def _overlaps_itself(tensor: Tensor) -> bool:
    """Whether two of its elements may be one: where no stride steps over all that those below it reach."""
    reach = 0
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size > 1 and stride <= reach:
            return tensor.numel() > 0
        reach += stride * (size - 1)
    return False


class _Range(NamedTuple):
    """The bytes from the first to the last of a part that is to be filled."""

    device: str
    first: int
    end: int
    wanted: TensorMatch
    part: Part


def _overlaps(tensors: Sequence[TensorMatch]) -> Iterator[str]:
    """Of two targets that share memory and are not the same, what is wrong: one would undo the other."""
    if not _may_overlap([wanted.leaf for wanted in tensors]):
        return
    ranges = [_range(wanted, part) for wanted in tensors for part in wanted.leaf.parts if part.tensor.numel()]
    ranges.sort(key=lambda one: one[:3])
    before: list[_Range] = []
    for one in ranges:
        before = [other for other in before if other.device == one.device and other.end > one.first]
        for other in before:
            if not _is_alias(one, other) and _share_memory(one.part.tensor, other.part.tensor):
                yield (
                    f"memory: {other.wanted.name!r} and {one.wanted.name!r} overlap in memory and are not the same: "
                    "loading one would undo the other; give copies, or choose one with only="
                )
        before.append(one)


def _may_overlap(leaves: Sequence[Leaf]) -> bool:
    """Whether any two reach into each other's memory, at first sight: whatever their devices, and all of them at once.

    Most never do, and an exact look at each would take longer than reading a small one.
    """
    tensors = [part.tensor for leaf in leaves for part in leaf.parts]
    nbytes = np.array([tensor.nbytes if tensor.is_contiguous() else _reach(tensor) for tensor in tensors], np.uint64)
    first = np.array([tensor.data_ptr() for tensor in tensors], np.uint64)[nbytes > 0]
    nbytes = nbytes[nbytes > 0]
    order = np.argsort(first, kind="stable")
    end = np.maximum.accumulate((first + nbytes)[order])
    return bool((first[order][1:] < end[:-1]).any())


def _reach(tensor: Tensor) -> int:
    """The bytes from the first of its elements to the end of the last."""
    if not tensor.numel():
        return 0
    steps = (stride * (size - 1) for stride, size in zip(tensor.stride(), tensor.shape, strict=True))
    return (sum(steps) + 1) * tensor.itemsize


def _range(wanted: TensorMatch, part: Part) -> _Range:
    first = part.tensor.data_ptr()
    return _Range(str(part.tensor.device), first, first + _reach(part.tensor), wanted, part)


def _is_alias(one: _Range, other: _Range) -> bool:
    """Whether both are one memory, seen alike, of one region of one stored tensor."""
    return (
        one[:3] == other[:3]
        and one.wanted.number == other.wanted.number
        and one.part.region == other.part.region
        and one.part.tensor.stride() == other.part.tensor.stride()
        and one.part.tensor.dtype == other.part.tensor.dtype
    )


class _Bytes:
    """A tensor's place in memory, for numpy; nothing is read there."""

    def __init__(self, tensor: Tensor) -> None:
        size = tensor.itemsize
        self.__array_interface__ = {
            "version": 3,
            "data": (tensor.data_ptr(), True),
            "shape": tuple(tensor.shape),
            "strides": tuple(stride * size for stride in tensor.stride()),
            "typestr": f"|V{size}",
        }


def _share_memory(one: Tensor, other: Tensor) -> bool:
    if one.is_contiguous() and other.is_contiguous():
        return True  # their ranges do
    try:
        both = np.asarray(_Bytes(one)), np.asarray(_Bytes(other))
        return np.shares_memory(*both, max_work=_MAX_WORK)  # type: ignore[arg-type]  # any number will do
    except np.exceptions.TooHardError:
        return True


def _is_cast(name: str, cast: Cast) -> bool:
    if isinstance(cast, Mapping):
        return next((bool(said) for pattern, said in cast.items() if fnmatchcase(name, pattern)), False)
    return bool(cast)


def _shown(value: Any) -> str:
    shown = repr(value)
    return shown if len(shown) < 60 else shown[:57] + "..."
