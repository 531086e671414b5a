"""The tree of a manifest, read: what is stored under which path.

A tree is checked once, when the manifest is read; what comes after it relies on that.
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
_MAX_DEPTH = 64  # a little more than `flatten` writes: what wraps a value counts here, too


class StoredTensor(NamedTuple):
    """A tensor of the checkpoint, by its number."""

    number: int
    is_array: bool


class StoredValue(NamedTuple):
    """A plain value, or an empty container."""

    value: Any


class StoredEntry(NamedTuple):
    """A leaf of the tree: its dotted name, the keys that lead to it (None once it was renamed), and what it is.

    `of_rank` if it is one rank's own. `path` are its keys whether it was renamed or not, `within` the kind of container
    that each of them is a key of ("d", "l" or "t"), and `codecs` the names of those that made what is above it, each
    with the number of keys that lead there.
    """

    name: str
    keys: tuple[Any, ...] | None
    what: StoredTensor | StoredValue
    of_rank: bool = False
    path: tuple[Any, ...] = ()
    within: str = ""
    codecs: tuple[tuple[int, str], ...] = ()


def check_tree(tree: Any, dtypes: Sequence[str]) -> None:
    """Sees that every node is of a known kind, none is too deep, and the tensors it names are there.

    `dtypes` are those of the tensors: what is to be an array is of a dtype that numpy has.
    """
    numbers: list[int] = []
    arrays: list[int] = []
    waiting = [(tree, 0)]
    while waiting:
        node, depth = waiting.pop()
        _check_depth(depth)
        match node:
            case int() if not isinstance(node, bool):
                numbers.append(node)
                continue
            case ["a", int(number)] if not isinstance(number, bool):
                arrays.append(number)
                continue
            case ["d", *pairs]:
                children = _checked(pairs)
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
                raise _unreadable(node)
        # Most nodes are tensors of a large dict: they need not wait for their turn.
        tensors = [child for child in children if type(child) is int]
        numbers += tensors
        if tensors:
            _check_depth(depth + 1)
        if len(tensors) < len(children):
            waiting += [(child, depth + 1) for child in children if type(child) is not int]
    numbers += arrays
    if numbers and not (min(numbers) >= 0 and max(numbers) < len(dtypes)):
        stranger = next(number for number in numbers if not 0 <= number < len(dtypes))
        raise FormatError(f"the tree names tensor {stranger}, and there are {len(dtypes)}")
    for number in arrays:
        if dtypes[number] not in NUMPY:
            raise FormatError(f"the tree has tensor {number} as an array, and numpy has no {dtypes[number]}")


def stored_entries(tree: Any, rank: int | None) -> list[StoredEntry]:
    """What is stored: first what is common to all ranks, in one order on all, then what `rank` has for itself."""
    found: list[StoredEntry] = []
    _find(tree, "", _Above((), "", (), False), rank, found)
    own = [entry for entry in found if entry.of_rank]
    return [entry for entry in found if not entry.of_rank] + own if own else found


def values_of_other_ranks(tree: Any, ranks: Collection[int]) -> list[tuple[str, int]]:
    """What ranks that are none of these have for themselves: the name of each value, and whose it is."""
    found: list[tuple[str, int]] = []
    waiting = [("", tree)]
    while waiting:
        name, node = waiting.pop()
        match node:
            case ["d", *pairs]:
                waiting += [(joined(name, key), child) for key, child in pairs_of(pairs) if type(child) is list]
            case ["l" | "t", *items]:
                waiting += [(joined(name, place), item) for place, item in enumerate(items) if type(item) is list]
            case ["x", str(), inner]:
                waiting.append((name, inner))
            case ["r", *entries]:
                found += [(name, owner) for owner, _ in values_by_rank(entries) if owner not in ranks]
    return sorted(found)


def tensor_names(tree: Any) -> set[str]:
    """Return the names of all tensors and arrays of a tree; of what is one rank's own, with the rank.

    >>> sorted(tensor_names(["d", "w", 0, "own", ["r", [0, 1], [1, 2]], "epoch", ["v", 3]]))
    ['own (rank 0)', 'own (rank 1)', 'w']
    """
    found: set[str] = set()
    waiting = [("", "", tree)]
    while waiting:
        name, owner, node = waiting.pop()
        match node:
            case int() | ["a", int()]:
                found.add(name + owner)
            case ["d", *pairs]:
                waiting += [(joined(name, key), owner, child) for key, child in pairs_of(pairs)]
            case ["l" | "t", *items]:
                waiting += [(joined(name, place), owner, item) for place, item in enumerate(items)]
            case ["x", str(), inner]:
                waiting.append((name, owner, inner))
            case ["r", *entries]:
                waiting += [(name, f" (rank {rank})", inner) for rank, inner in values_by_rank(entries)]
    return found


class _Above(NamedTuple):
    """What lies above a node: see `StoredEntry`."""

    keys: tuple[Any, ...]
    within: str
    codecs: tuple[tuple[int, str], ...]
    of_rank: bool


def _find(node: Any, name: str, above: _Above, rank: int | None, found: list[StoredEntry]) -> None:
    keys, within, codecs, of_rank = above
    what: StoredTensor | StoredValue
    match node:
        case int():
            what = StoredTensor(node, is_array=False)
        case ["a", int(number)]:
            what = StoredTensor(number, is_array=True)
        case ["d" | "l" | "t" as kind]:
            what = StoredValue({"d": {}, "l": [], "t": ()}[kind])
        case ["d" | "l" | "t" as kind, *items]:
            within += kind
            begin = prefix(name)
            for key, child in pairs_of(items) if kind == "d" else enumerate(items):
                below = (*keys, key)
                if type(child) is int:  # as most are
                    what = StoredTensor(child, False)
                    found.append(StoredEntry(f"{begin}{key}", below, what, of_rank, below, within, codecs))
                else:
                    _find(child, f"{begin}{key}", _Above(below, within, codecs, of_rank), rank, found)
            return
        case ["x", str(codec), inner]:
            _find(inner, name, above._replace(codecs=(*codecs, (len(keys), codec))), rank, found)
            return
        case ["r", *entries]:
            for owner, inner in values_by_rank(entries):
                if owner == rank:
                    _find(inner, name, above._replace(of_rank=True), rank, found)
            return
        case _:
            what = StoredValue(decode_value(node))
    found.append(StoredEntry(name, keys, what, of_rank, keys, within, codecs))


def pairs_of(items: list[Any]) -> Iterator[tuple[Any, Any]]:
    """The keys and children of a dict of a tree that was checked."""
    return zip(items[::2], items[1::2], strict=True)


def _checked(items: list[Any]) -> list[Any]:
    """The children of a dict, once its keys are known to be such."""
    if len(items) % 2:
        raise FormatError("a dict of the tree has a key without a value")
    keys = items[::2]
    if not all(map(_KEYS.__contains__, map(type, keys))):
        raise FormatError("a dict of the tree has a key that is no text, number, truth or None")
    if len(set(zip(map(type, keys), keys, strict=True))) != len(keys):  # True is no 1
        raise FormatError("a dict of the tree has a key twice")
    return items[1::2]


def values_by_rank(entries: list[Any]) -> list[tuple[int, Any]]:
    """Of each rank its own node: each of another rank."""
    found: dict[int, Any] = {}
    for entry in entries:
        match entry:
            case [int(rank), inner] if not isinstance(rank, bool) and rank not in found:
                found[rank] = inner
            case _:
                raise _unreadable(entry)
    return list(found.items())


def _check_depth(depth: int) -> None:
    if depth > _MAX_DEPTH:
        raise FormatError(f"the tree is nested more than {_MAX_DEPTH} deep")


def _unreadable(node: Any) -> FormatError:
    return FormatError(f"node {reprlib.repr(node)} of the tree is of no known kind")
