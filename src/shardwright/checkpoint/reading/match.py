"""Match the target of a load with what is stored, and find all mismatches before any data is read.

An entry is found by its key path; if key paths differ (a list instead of a dict, "a.b" instead of "a" and "b"), by its
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
from shardwright.checkpoint.format.values import DTYPES, EnumValue, Opaque
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
    "leaf_nodes",
    "match_state",
    "matched_entries",
    "rename_entries",
    "unclaimed_rank_values",
]

_MAX_WORK = 100_000  # limit of the exact check for shared memory; beyond it, tensors count as overlapping


class TensorMatch(NamedTuple):
    """A leaf of the target and the index of the stored tensor that fills it."""

    name: str
    leaf: Leaf
    number: int


class Match(NamedTuple):
    """The matches and mismatches of this rank.

    `values` has the plain values to set, by the id of their nodes. `missing` has the names of the target that are not
    in the checkpoint. `emptied` has the ids of containers that are empty in the checkpoint. `unexpected` has the
    indices of stored entries that this rank does not use; another rank may. `idle` has patterns of `only` that match no
    name here. `faults` are complete sentences.
    """

    tensors: list[TensorMatch]
    values: dict[int, Any]
    missing: list[str]
    unexpected: list[int]
    idle: list[str]
    faults: list[str]
    emptied: set[int]


def unclaimed_rank_values(tree: Any, ranks: Sequence[int]) -> list[str]:
    """Return the faults of `PerRank` values of ranks that are not part of this load."""
    return [
        f"unexpected: {name!r} of rank {owner} is in the checkpoint, and no rank {owner} loads it; "
        "strict=False leaves it out"
        for name, owner in values_of_other_ranks(tree, frozenset(ranks))
    ]


def rename_entries(stored: Sequence[StoredEntry], rename: Rename | None) -> tuple[list[StoredEntry], list[str]]:
    """Return the stored entries under the names that `rename` gives them, and the faults of these names.

    A renamed entry is found by its new name only.
    """
    if rename is None:
        return list(stored), []
    if not (callable(rename) or isinstance(rename, Mapping)):
        raise ArgumentTypeError(f"rename must be a function or a mapping of names, got {type(rename).__name__}")
    renamed: list[StoredEntry] = []
    faults: list[str] = []
    old_names: dict[str, str] = {}
    if isinstance(rename, Mapping):
        unknown = rename.keys() - {entry.name for entry in stored}
        faults = [f"rename: the checkpoint has no {name!r}" for name in sorted(map(str, unknown))]
    for entry in stored:
        new = rename(entry.name) if callable(rename) else rename.get(entry.name, entry.name)
        if not isinstance(new, str):
            raise ArgumentTypeError(f"rename must return a str, got {new!r} for {entry.name!r}")
        other = old_names.setdefault(new, entry.name)
        if other != entry.name:
            faults.append(f"rename: {other!r} and {entry.name!r} both become {new!r}")
        renamed.append(entry if new == entry.name else entry._replace(name=new, keys=None))
    return renamed, faults


def match_state(
    flat: FlatState,
    stored: Sequence[StoredEntry],
    table: TensorTable,
    request: LoadRequest,
    *,
    faults: Sequence[str] = (),
    created: Container[Any] = (),
) -> Match:
    """Match the state with the stored entries; `faults` are already known. Only arguments of a wrong type raise.

    `created` has the objects that were created without contents: they must be filled.
    """
    match = Match([], {}, [], [], [], list(faults), set())
    nodes = leaf_nodes(flat)
    patterns = patterns_of(request.only)
    selected = nodes if patterns is None else _chosen(nodes, patterns, match.idle)
    lookup = _Index(stored, nodes)
    fit = _Fit(table, request.cast)
    used: set[int] = set()
    read: dict[tuple[Any, ...], TensorMatch] = {}  # memory to fill, and the match that fills it
    for node, leaf, codecs in selected:
        index = lookup.find(node)
        if index is None:
            if node.original in created or _is_required(node.name, request.on_missing):
                match.missing.append(node.name)
            continue
        if index in used:
            match.faults.append(
                f"twice: two leaves of the state have the name {node.name!r}, but the checkpoint has it once, under "
                "other keys; rename one of them"
            )
            continue
        used.add(index)
        entry = stored[index]
        if codecs:
            match.faults.extend(_other_codec(node.name, codecs, [name for _, name in entry.codecs]))
        content = entry.content
        if leaf is None:
            _take_value(match, node, content)
        elif isinstance(content, StoredValue):
            match.faults.append(
                f"kind: {node.name!r} is a tensor in the state, but {_brief(content.value)} in the checkpoint"
            )
        else:
            if not fit.is_plain(node, leaf, content.number):
                match.faults.extend(fit.faults(node, leaf, content.number))
            tensor_match = TensorMatch(node.name, leaf, content.number)
            first = read.setdefault(leaf.identity, tensor_match) if leaf.is_held else tensor_match
            if first is tensor_match:
                match.tensors.append(tensor_match)
            elif first.number != content.number and request.strict:
                match.faults.append(
                    f"tied: {first.name!r} and {node.name!r} share memory in the state, but are two tensors in the "
                    "checkpoint; untie them, choose one with only=, or take the first with strict=False"
                )
    match.faults.extend(_overlaps(match.tensors))
    unused = [index for index in range(len(stored)) if index not in used]
    branches = {branch.name: branch for branch in _branches(flat.root)} if unused else {}
    for index in unused:
        entry = stored[index]
        branch = branches.get(entry.name)
        if isinstance(entry.content, StoredTensor) or branch is None:
            continue
        used.add(index)  # a container exists for it: an empty one is not a mismatch, anything else is
        if patterns is None or fits(entry.name, patterns):
            match.emptied.add(id(branch))
        if request.only is None and not isinstance(entry.content.value, dict | list | tuple):
            match.faults.append(
                f"kind: {entry.name!r} is a container in the state, but {_brief(entry.content.value)} in the checkpoint"
            )
    if request.strict and request.only is None:
        for index in (index for index in unused if index not in used):
            if stored[index].of_rank:  # no other rank can use it
                match.faults.append(f"unexpected: {stored[index].name!r} is in the checkpoint and not in the state")
            else:
                match.unexpected.append(index)
    return match


def matched_entries(flat: FlatState, stored: Sequence[StoredEntry]) -> set[int]:
    """Return the indices of the stored entries that this state uses."""
    nodes = leaf_nodes(flat)
    lookup = _Index(stored, nodes)
    return {index for node, *_ in nodes if (index := lookup.find(node)) is not None}


class _Index:
    """The stored entries, by key path and by name."""

    def __init__(self, stored: Sequence[StoredEntry], nodes: Sequence[_LeafNode]) -> None:
        self._stored, self._nodes = stored, nodes
        self._by_keys = {entry.keys: index for index, entry in enumerate(stored) if entry.keys is not None}

    @cached_property
    def _by_name(self) -> dict[str, int]:
        """Indices of the stored entries by name; -1 for a name that is not unique."""
        indices: dict[str, int] = {}
        for index, entry in enumerate(self._stored):
            indices[entry.name] = -1 if entry.name in indices else index
        return indices

    @cached_property
    def _matched_by_path(self) -> set[int]:
        """The entries that a node matches by key path."""
        return {at for node, *_ in self._nodes if (at := self._with_keys(node.keys)) is not None}

    def find(self, node: TensorNode | ValueNode) -> int | None:
        """Look up by key path; fall back to a unique name that no other node claims by key path."""
        index = self._with_keys(node.keys)
        if index is not None:
            return index
        named = self._by_name.get(node.name)
        return None if named == -1 or named in self._matched_by_path else named

    def _with_keys(self, keys: Keys) -> int | None:
        index = self._by_keys.get(keys)
        if index is None or not all(map(is_, map(type, keys), map(type, self._stored[index].path))):  # True is not 1
            return None
        return index


_LeafNode: TypeAlias = tuple[TensorNode | ValueNode, Leaf | None, tuple[str, ...]]
"""A leaf of the target: its node, its `Leaf` if it is a tensor, and the codecs above it."""


def leaf_nodes(flat: FlatState) -> list[_LeafNode]:
    """Return the leaves of a target, in order."""
    found: list[_LeafNode] = []
    _add_leaf_nodes(flat.root, flat, (), found)
    return found


def _add_leaf_nodes(node: Node, flat: FlatState, codecs: tuple[str, ...], leaf_nodes: list[_LeafNode]) -> None:
    match node:
        case TensorNode():
            leaf_nodes.append((node, flat.leaves[node.number], codecs))
        case ValueNode():
            leaf_nodes.append((node, None, codecs))
        case ContainerNode():
            for child in node.children:
                _add_leaf_nodes(child, flat, codecs, leaf_nodes)
        case ObjectNode():
            _add_leaf_nodes(node.inner, flat, codecs, leaf_nodes)
        case CodecNode():
            _add_leaf_nodes(node.inner, flat, (*codecs, node.codec.name), leaf_nodes)
        case PerRankNode():
            _add_leaf_nodes(node.flat.root, node.flat, codecs, leaf_nodes)


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


def _chosen(nodes: Sequence[_LeafNode], patterns: Sequence[str], idle: list[str]) -> list[_LeafNode]:
    waiting = dict.fromkeys(patterns)
    chosen = []
    for leaf_node in nodes:
        fitting = [pattern for pattern in patterns if fnmatchcase(leaf_node[0].name, pattern)]
        for pattern in fitting:
            waiting.pop(pattern, None)
        chosen += [leaf_node] if fitting else []
    idle += waiting
    return chosen


def _is_required(name: str, on_missing: OnMissing) -> bool:
    action = on_missing(name) if callable(on_missing) else on_missing
    if action not in ("raise", "keep"):
        raise ArgumentTypeError(f"on_missing must be or return 'raise' or 'keep', got {action!r} for {name!r}")
    return action == "raise"


def _take_value(match: Match, node: TensorNode | ValueNode, entry: StoredTensor | StoredValue) -> None:
    if isinstance(entry, StoredTensor):
        match.faults.append(
            f"kind: {node.name!r} is {_brief(node.original)} in the state, but a tensor in the checkpoint"
        )
    elif isinstance(entry.value, dict | list | tuple):
        stored = f"an empty {type(entry.value).__name__}"
        match.faults.append(
            f"kind: {node.name!r} is {_brief(node.original)} in the state, but {stored} in the checkpoint"
        )
    elif isinstance(entry.value, Opaque):
        match.faults.append(
            f"opaque: {node.name!r} is a {entry.value.type_name} in the checkpoint, which was not read: "
            f"{entry.value.reason}; leave it out with only=, or read it with what wrote it"
        )
    elif isinstance(entry.value, EnumValue) and isinstance(node.original, enum.Enum):
        kind = type(node.original)
        member = entry.value.of_type(kind)
        if member is None:
            stored = f"{entry.value.type_name}.{entry.value.name} ({_brief(entry.value.value)})"
            match.faults.append(
                f"enum: {node.name!r} is {stored} in the checkpoint, which is not a member of {kind.__name__} in the "
                "state"
            )
        match.values[id(node)] = member
    elif isinstance(entry.value, EnumValue):
        match.values[id(node)] = entry.value.value
    else:
        is_bytearray = isinstance(entry.value, bytes) and type(node.original) is bytearray
        match.values[id(node)] = bytearray(entry.value) if is_bytearray else entry.value


def _other_codec(name: str, in_state: Sequence[str], in_checkpoint: Sequence[str]) -> Iterator[str]:
    """Check that a value is read by the codec that stored it. Reading it without a codec is allowed."""
    if in_state and list(in_state) != list(in_checkpoint):
        expected, actual = (" in ".join(map(repr, names)) if names else "none" for names in (in_state, in_checkpoint))
        yield (
            f"codec: {name!r} is read by codec {expected} in the state, but was stored by {actual}; pass it in codecs="
        )


class _Fit:
    """Check whether stored tensors fit the tensors of the target."""

    def __init__(self, table: TensorTable, cast: Cast) -> None:
        self._table, self._cast = table, cast
        self._shapes = [sharding.shape for sharding in table.shardings]
        self._kinds: list[int] = table.kinds.tolist()

    def is_plain(self, node: TensorNode | ValueNode, leaf: Leaf, number: int) -> bool:
        """Return True for the usual case: an exact fit that needs no further checks."""
        return (
            leaf.dtype == self._table.dtypes[number]
            and leaf.sharding.shape == self._shapes[self._kinds[number]]
            and leaf.is_straight
            and isinstance(node, TensorNode)
            and not node.is_array
            and type(node.original) is not TrackedCopy
        )

    def faults(self, node: TensorNode | ValueNode, leaf: Leaf, number: int) -> Iterator[str]:
        """Yield the reasons why a stored tensor cannot be loaded into a leaf."""
        shape, stored_shape = leaf.sharding.shape, self._table.shape(number)
        name = node.name
        if shape != stored_shape:
            yield f"shape: {name!r} is {list(shape)} in the state, but {list(stored_shape)} in the checkpoint"
        stored = self._table.dtypes[number]
        if leaf.dtype != stored:
            message = f"dtype: {name!r} is {leaf.dtype} in the state, but {stored} in the checkpoint"
            if not _is_cast(name, self._cast):
                yield f"{message}; cast=True converts it"
            elif DTYPES[stored].is_complex and not DTYPES[leaf.dtype].is_complex:
                yield f"{message}: a cast would lose its imaginary part"
        if isinstance(node, TensorNode) and node.is_array and not node.original.flags.writeable:
            yield f"memory: {name!r} is a read-only array; pass a copy of it"
        if type(node.original) is TrackedCopy:
            yield (
                f"memory: {name!r} looks like a view of a DTensor but is a copy, as it needed communication: loading "
                "into it would not change the base; pass the base, or a clone()"
            )
        for part in leaf.parts:
            if not part.tensor.is_contiguous() and _overlaps_itself(part.tensor):
                yield (
                    f"memory: {name!r} has strides {list(part.tensor.stride())}, so several of its elements share "
                    "memory; pass a contiguous() copy"
                )


def _overlaps_itself(tensor: Tensor) -> bool:
    """Return True if two indices may refer to the same memory (overlapping strides)."""
    reach = 0
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size > 1 and stride <= reach:
            return tensor.numel() > 0
        reach += stride * (size - 1)
    return False


class _Range(NamedTuple):
    """The address range of a part that is to be filled."""

    device: str
    first: int
    end: int
    match: TensorMatch
    part: Part


def _overlaps(tensors: Sequence[TensorMatch]) -> Iterator[str]:
    """Report targets that partially overlap in memory: loading one would corrupt the other."""
    if not _may_overlap([match.leaf for match in tensors]):
        return
    ranges = [_range(match, part) for match in tensors for part in match.leaf.parts if part.tensor.numel()]
    ranges.sort(key=lambda current: current[:3])
    before: list[_Range] = []
    for current in ranges:
        before = [other for other in before if other.device == current.device and other.end > current.first]
        for other in before:
            if not _is_alias(current, other) and _share_memory(current.part.tensor, other.part.tensor):
                yield (
                    f"memory: {other.match.name!r} and {current.match.name!r} overlap in memory but are not the "
                    "same: loading "
                    "one would corrupt the other; pass copies, or choose one with only="
                )
        before.append(current)


def _may_overlap(leaves: Sequence[Leaf]) -> bool:
    """Return True if any two address ranges overlap, in a fast check over all leaves at once, whatever their devices.

    Most never do, and an exact check of each would take longer than reading a small tensor.
    """
    tensors = [part.tensor for leaf in leaves for part in leaf.parts]
    nbytes = np.array([tensor.nbytes if tensor.is_contiguous() else _span(tensor) for tensor in tensors], np.uint64)
    first = np.array([tensor.data_ptr() for tensor in tensors], np.uint64)[nbytes > 0]
    nbytes = nbytes[nbytes > 0]
    order = np.argsort(first, kind="stable")
    end = np.maximum.accumulate((first + nbytes)[order])
    return bool((first[order][1:] < end[:-1]).any())


def _span(tensor: Tensor) -> int:
    """Return the bytes from the first element to the end of the last."""
    if not tensor.numel():
        return 0
    steps = (stride * (size - 1) for stride, size in zip(tensor.stride(), tensor.shape, strict=True))
    return (sum(steps) + 1) * tensor.itemsize


def _range(match: TensorMatch, part: Part) -> _Range:
    first = part.tensor.data_ptr()
    return _Range(str(part.tensor.device), first, first + _span(part.tensor), match, part)


def _is_alias(first: _Range, second: _Range) -> bool:
    """Return True if both are the same view of the same memory, filled from the same stored region."""
    return (
        first[:3] == second[:3]
        and first.match.number == second.match.number
        and first.part.region == second.part.region
        and first.part.tensor.stride() == second.part.tensor.stride()
        and first.part.tensor.dtype == second.part.tensor.dtype
    )


class _Bytes:
    """The memory of a tensor, for numpy; nothing is read from it."""

    def __init__(self, tensor: Tensor) -> None:
        size = tensor.itemsize
        self.__array_interface__ = {
            "version": 3,
            "data": (tensor.data_ptr(), True),
            "shape": tuple(tensor.shape),
            "strides": tuple(stride * size for stride in tensor.stride()),
            "typestr": f"|V{size}",
        }


def _share_memory(first: Tensor, second: Tensor) -> bool:
    if first.is_contiguous() and second.is_contiguous():
        return True  # their address ranges overlap
    try:
        arrays = np.asarray(_Bytes(first)), np.asarray(_Bytes(second))
        return np.shares_memory(*arrays, max_work=_MAX_WORK)  # type: ignore[arg-type]  # any int will do
    except np.exceptions.TooHardError:
        return True


def _is_cast(name: str, cast: Cast) -> bool:
    if isinstance(cast, Mapping):
        return next((bool(value) for pattern, value in cast.items() if fnmatchcase(name, pattern)), False)
    return bool(cast)


def _brief(value: Any) -> str:
    shown = repr(value)
    return shown if len(shown) < 60 else shown[:57] + "..."
