"""The tree of a manifest: which values and tensors are stored under which path.

A tree is checked once, when the manifest is read; everything else relies on it.
"""

from __future__ import annotations

import reprlib
from collections.abc import Collection, Iterator, Sequence
from typing import Any, NamedTuple

from shardwright.checkpoint.format.names import joined, prefix
from shardwright.checkpoint.format.values import NUMPY, decode_value
from shardwright.errors import FormatError

__all__ = [
    "StoredEntry",
    "StoredTensor",
    "StoredValue",
    "check_tree",
    "pairs_of",
    "stored_entries",
    "tensor_names",
    "values_by_rank",
    "values_of_other_ranks",
]

_KEYS = frozenset({str, int, float, bool, type(None)})
_MAX_DEPTH = 64  # a little more than `flatten` writes: codecs count here, too


class StoredTensor(NamedTuple):
    """A stored tensor, by its index in the tensor table."""

    number: int
    is_array: bool


class StoredValue(NamedTuple):
    """A plain value, or an empty container."""

    value: Any


class StoredEntry(NamedTuple):
    """A leaf of the tree: its dotted name, its keys (None once it was renamed), and the tensor or value.

    `of_rank` is True for a `PerRank` value. `path` has its keys even if it was renamed, `within` the kind of container
    ("d", "l" or "t") of each key, and `codecs` the codecs of the containers above it, each with the number of keys that
    lead there.
    """

    name: str
    keys: tuple[Any, ...] | None
    content: StoredTensor | StoredValue
    of_rank: bool = False
    path: tuple[Any, ...] = ()
    within: str = ""
    codecs: tuple[tuple[int, str], ...] = ()


def check_tree(tree: Any, dtypes: Sequence[str]) -> None:
    """Check that every node is of a known kind and not nested too deeply, and that its tensors exist.

    `dtypes` are those of the tensors: an array must have a dtype that numpy supports.
    """
    tensor_numbers: list[int] = []
    arrays: list[int] = []
    pending = [(tree, 0)]
    while pending:
        node, depth = pending.pop()
        _check_depth(depth)
        match node:
            case int() if not isinstance(node, bool):
                tensor_numbers.append(node)
                continue
            case ["a", int(number)] if not isinstance(number, bool):
                arrays.append(number)
                continue
            case ["d", *pairs]:
                children = _check_keys(pairs)
            case ["l" | "t", *items]:
                children = items
            case ["x", str(), inner]:
                children = [inner]
            case ["r", *entries]:
                children = [inner for _, inner in values_by_rank(entries)]
            case [str(), *_]:
                decode_value(node)
                continue
            case _:
                raise _unknown_node(node)
        # Most nodes are tensors in a large dict: handle them directly.
        tensors = [child for child in children if type(child) is int]
        tensor_numbers += tensors
        if tensors:
            _check_depth(depth + 1)
        if len(tensors) < len(children):
            pending += [(child, depth + 1) for child in children if type(child) is not int]
    tensor_numbers += arrays
    if tensor_numbers and not (min(tensor_numbers) >= 0 and max(tensor_numbers) < len(dtypes)):
        invalid = next(number for number in tensor_numbers if not 0 <= number < len(dtypes))
        raise FormatError(f"the tree refers to tensor {invalid}, but there are {len(dtypes)}")
    for number in arrays:
        if dtypes[number] not in NUMPY:
            raise FormatError(f"tensor {number} is stored as an array, but numpy has no {dtypes[number]}")


def stored_entries(tree: Any, rank: int | None) -> list[StoredEntry]:
    """Return the stored entries: first those common to all ranks, in the same order on all, then those of `rank`."""
    entries: list[StoredEntry] = []
    _collect_entries(tree, "", _Context((), "", (), False), rank, entries)
    of_this_rank = [entry for entry in entries if entry.of_rank]
    return [entry for entry in entries if not entry.of_rank] + of_this_rank if of_this_rank else entries


def values_of_other_ranks(tree: Any, ranks: Collection[int]) -> list[tuple[str, int]]:
    """Return the `PerRank` values of ranks that are not among these: name and rank of each."""
    values: list[tuple[str, int]] = []
    pending = [("", tree)]
    while pending:
        name, node = pending.pop()
        match node:
            case ["d", *pairs]:
                pending += [(joined(name, key), child) for key, child in pairs_of(pairs) if type(child) is list]
            case ["l" | "t", *items]:
                pending += [(joined(name, index), item) for index, item in enumerate(items) if type(item) is list]
            case ["x", str(), inner]:
                pending.append((name, inner))
            case ["r", *entries]:
                values += [(name, owner) for owner, _ in values_by_rank(entries) if owner not in ranks]
    return sorted(values)


def tensor_names(tree: Any) -> set[str]:
    """Return the names of all tensors and arrays of a tree; those of `PerRank` values with their rank.

    >>> sorted(tensor_names(["d", "w", 0, "own", ["r", [0, 1], [1, 2]], "epoch", ["v", 3]]))
    ['own (rank 0)', 'own (rank 1)', 'w']
    """
    names: set[str] = set()
    pending = [("", "", tree)]
    while pending:
        name, owner, node = pending.pop()
        match node:
            case int() | ["a", int()]:
                names.add(name + owner)
            case ["d", *pairs]:
                pending += [(joined(name, key), owner, child) for key, child in pairs_of(pairs)]
            case ["l" | "t", *items]:
                pending += [(joined(name, index), owner, item) for index, item in enumerate(items)]
            case ["x", str(), inner]:
                pending.append((name, owner, inner))
            case ["r", *entries]:
                pending += [(name, f" (rank {rank})", inner) for rank, inner in values_by_rank(entries)]
    return names


class _Context(NamedTuple):
    """The context of a node: see `StoredEntry`."""

    keys: tuple[Any, ...]
    within: str
    codecs: tuple[tuple[int, str], ...]
    of_rank: bool


def _collect_entries(node: Any, name: str, context: _Context, rank: int | None, result: list[StoredEntry]) -> None:
    keys, within, codecs, of_rank = context
    content: StoredTensor | StoredValue
    match node:
        case int():
            content = StoredTensor(node, is_array=False)
        case ["a", int(number)]:
            content = StoredTensor(number, is_array=True)
        case ["d" | "l" | "t" as kind]:
            content = StoredValue({"d": {}, "l": [], "t": ()}[kind])
        case ["d" | "l" | "t" as kind, *items]:
            within += kind
            begin = prefix(name)
            for key, child in pairs_of(items) if kind == "d" else enumerate(items):
                below = (*keys, key)
                if type(child) is int:  # the usual case
                    content = StoredTensor(child, False)
                    result.append(StoredEntry(f"{begin}{key}", below, content, of_rank, below, within, codecs))
                else:
                    _collect_entries(child, f"{begin}{key}", _Context(below, within, codecs, of_rank), rank, result)
            return
        case ["x", str(codec), inner]:
            _collect_entries(inner, name, context._replace(codecs=(*codecs, (len(keys), codec))), rank, result)
            return
        case ["r", *entries]:
            for owner, inner in values_by_rank(entries):
                if owner == rank:
                    _collect_entries(inner, name, context._replace(of_rank=True), rank, result)
            return
        case _:
            content = StoredValue(decode_value(node))
    result.append(StoredEntry(name, keys, content, of_rank, keys, within, codecs))


def pairs_of(items: list[Any]) -> Iterator[tuple[Any, Any]]:
    """Yield the keys and children of a dict node that was checked."""
    return zip(items[::2], items[1::2], strict=True)


def _check_keys(items: list[Any]) -> list[Any]:
    """Check the keys of a dict node and return its children."""
    if len(items) % 2:
        raise FormatError("a dict of the tree has a key without a value")
    keys = items[::2]
    if not all(map(_KEYS.__contains__, map(type, keys))):
        raise FormatError("a dict of the tree has a key that is not a str, number, bool or None")
    if len(set(zip(map(type, keys), keys, strict=True))) != len(keys):  # True is not 1
        raise FormatError("a dict of the tree repeats a key")
    return items[1::2]


def values_by_rank(entries: list[Any]) -> list[tuple[int, Any]]:
    """Return the node of each rank, of which none is repeated."""
    by_rank: dict[int, Any] = {}
    for entry in entries:
        match entry:
            case [int(rank), inner] if not isinstance(rank, bool) and rank not in by_rank:
                by_rank[rank] = inner
            case _:
                raise _unknown_node(entry)
    return list(by_rank.items())


def _check_depth(depth: int) -> None:
    if depth > _MAX_DEPTH:
        raise FormatError(f"the tree is nested more than {_MAX_DEPTH} deep")


def _unknown_node(node: Any) -> FormatError:
    return FormatError(f"unknown kind of node {reprlib.repr(node)} in the tree")
