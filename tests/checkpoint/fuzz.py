"""Mutations of manifests, by bytes and by fields, each with a valid digest."""

from __future__ import annotations

import hashlib
import json
import random
from copy import deepcopy
from typing import Any

NUMBERS = [0, 1, -1, 2, 3, 63, 64, 65, 255, 4096, 2**20, 2**31, 2**32, 2**53, 2**62, 2**63 - 1, 2**63, 2**64, 2**70]
OTHERS: list[Any] = [
    None, True, False, 0.5, -0.0, 1e300, "", "a", "\0", "../../etc/passwd", "/abs", "é" * 50, "x" * 5000, [], {}, [[]],
    [0] * 70, {"a": 1}, ["d"], ["d", "k"], ["l", 0], ["v", [1]], ["e", "A", "B", ["v", 1]], ["r", [0, 0], [0, 0]],
    ["timedelta", 10**12, 0, 0], ["n", "float64", "AAAA"], ["i", "9" * 5000], ["dtype", "nn"], ["b", "*"],
    "float64", "int4", "quint8", "load", ["g", 0, [1, 2]], ["s", 99], ["s", -1], ["p"],
]  # fmt: skip


def signed(text: bytes) -> bytes:
    """A manifest with the digest of what it says; `text` ends before the digest's field."""
    zeros = text + b'"digest":"' + b"0" * 32 + b'"}'
    return text + b'"digest":"' + hashlib.blake2b(zeros, digest_size=16).hexdigest().encode() + b'"}'


def unsigned(manifest: bytes) -> bytes:
    """A manifest without its digest's field."""
    return manifest[: manifest.rindex(b'"digest":"')]


def written(fields: dict[str, Any]) -> bytes:
    """A manifest that says this, as a writer would write it."""
    plain = {name: value for name, value in fields.items() if name != "digest"}
    return signed(json.dumps(plain, separators=(",", ":"), ensure_ascii=False).encode("utf-8", "replace")[:-1] + b",")


def mutated_bytes(manifest: bytes, chance: random.Random) -> bytes:
    """A few bytes changed, removed, put in or repeated."""
    data = bytearray(unsigned(manifest))
    for _ in range(chance.choice([1, 1, 1, 2, 5])):
        at = chance.randrange(len(data))
        match chance.randrange(5):
            case 0:
                data[at] = chance.randrange(256)
            case 1:
                data[at] ^= 1 << chance.randrange(8)
            case 2:
                del data[at : at + chance.choice([1, 2, 10])]
            case 3:
                data[at:at] = chance.choice([b"[", b"]", b'"', b",", b"9", b"-", b"\\ud800", b"\xff", b" ", b"null"])
            case 4:
                data[at:at] = data[at : at + chance.choice([1, 5, 50])]
    return signed(bytes(data))


def mutated_values(manifest: bytes, chance: random.Random) -> bytes:
    """A few values changed, removed, repeated or exchanged, wherever they are."""
    fields = json.loads(manifest)
    for _ in range(chance.choice([1, 1, 1, 2, 4])):
        holder, key = _place(fields, chance)
        old = holder[key]
        match chance.randrange(6):
            case 0 if isinstance(old, int):
                holder[key] = old + chance.choice([-1, 1, 7, -7])
            case 0 | 1:
                holder[key] = chance.choice(NUMBERS)
            case 2:
                holder[key] = deepcopy(chance.choice(OTHERS))
            case 3 if isinstance(holder, list):
                del holder[key]
            case 4 if isinstance(holder, list):
                holder.insert(key, deepcopy(old))
            case _:
                other, there = _place(fields, chance)
                holder[key] = deepcopy(other[there])
    return written(fields)


def _place(fields: dict[str, Any], chance: random.Random) -> tuple[Any, Any]:
    """Some container within, and a key of it: deep ones as likely as shallow ones."""
    holder: Any = fields
    key: Any = chance.choice(["shardwright", "save", "tree", "tensors", "tensors", "tensors", "files"])
    while isinstance(holder[key], list | dict) and holder[key] and chance.random() < 0.8:
        holder = holder[key]
        key = chance.choice(list(holder)) if isinstance(holder, dict) else chance.randrange(len(holder))
    return holder, key


def mutated_structure(manifest: bytes, chance: random.Random) -> bytes:
    """One part changed into another that could be: layouts, tilings, sizes, keys, fields, nesting."""
    fields = json.loads(manifest)
    for _ in range(chance.choice([1, 1, 2, 3])):
        chance.choice(_STRUCTURES)(fields, chance)
    if chance.random() < 0.5:
        _make_claims_true(fields)
    data = written(fields)
    if chance.random() < 0.1:  # a field twice, which no dict can hold
        name = chance.choice(["save", "tree", "tensors", "files", "more"])
        data = signed(
            unsigned(data) + json.dumps({name: fields.get(name, 1)}, separators=(",", ":"))[1:-1].encode() + b","
        )
    return data


def _part(fields: dict[str, Any], chance: random.Random, *column: Any) -> tuple[list[Any], int] | None:
    """A list within the manifest, and a place in it; None where another mutation has taken it away."""
    found: Any = fields
    try:
        for key in column:
            found = found[key]
        return (found, chance.randrange(len(found))) if isinstance(found, list) and found else None
    except (KeyError, IndexError, TypeError):
        return None


def _spread(fields: dict[str, Any], chance: random.Random) -> None:
    """Another mesh, or other placements on it."""
    ndim = chance.choice([1, 1, 2, 3, 16])
    shape = [chance.choice([1, 2, 3, 4, 64, 2**12, 2**18]) for _ in range(ndim)]
    size = 1
    for extent in shape:
        size *= extent
    ranks = chance.choice([None, None, list(range(min(size, 5000))), [3, 1, 0, 2], list(range(min(size, 5000), 0, -1))])
    placements = [
        chance.choice(
            [["r"], ["s", chance.randrange(-1, 4)], ["g", 0, [chance.randrange(20) for _ in range(extent % 99)]]]
        )
        for extent in shape
    ]
    order = chance.choice([None, None, chance.sample(range(ndim), ndim), [0] * ndim])
    names = chance.choice([None, [f"d{n}" for n in range(ndim)], ["d"] * ndim])
    part = _part(fields, chance, "tensors", 3)
    if part is not None:
        part[0][part[1]] = [shape, names, ranks, placements, order]


def _boxes(fields: dict[str, Any], chance: random.Random) -> None:
    """A tensor as pieces: ones that tile it, cut at random, perhaps with one of them moved, repeated or gone."""
    part = _part(fields, chance, "tensors", 4)
    if part is None:
        return
    shardings, at = part
    ndim = chance.choice([0, 1, 2, 3, 8, 20, 64])
    shape = [chance.choice([1, 2, 2, 5, 100]) for _ in range(ndim)]
    if chance.random() < 0.3 and isinstance(shardings[at], list) and len(shardings[at]) > 1:
        shape = deepcopy(shardings[at][1])
        if not isinstance(shape, list) or not all(isinstance(size, int) and 0 <= size < 2**62 for size in shape):
            return
    boxes = [([0] * len(shape), list(shape))]
    for _ in range(chance.choice([0, 1, 5, 40])):
        offset, size = boxes.pop(chance.randrange(len(boxes)))
        wide = [dim for dim, extent in enumerate(size) if extent > 1]
        if not wide:
            boxes.append((offset, size))
            continue
        dim = chance.choice(wide)
        cut = chance.randrange(1, size[dim])
        low, high = list(size), list(size)
        low[dim], high[dim] = cut, size[dim] - cut
        after = list(offset)
        after[dim] += cut
        boxes += [(offset, low), (after, high)]
    match chance.randrange(6):
        case 0:
            boxes.pop()
        case 1 if boxes:
            boxes.append(chance.choice(boxes))
        case 2 if shape:
            boxes[0][0][chance.randrange(len(shape))] += 1
    ranks = [chance.choice([0, 1, 2, 3, 3, 9]) for _ in boxes]
    shardings[at] = [
        -1,
        shape,
        [n for offset, _ in boxes for n in offset],
        [n for _, size in boxes for n in size],
        ranks,
    ]


def _longer(fields: dict[str, Any], chance: random.Random) -> None:
    """A list many times over, shuffled, turned round, cut off or within another."""
    column = chance.choice(
        [("tree",), ("tensors",), *(("tensors", n) for n in range(6)), ("files",), *(("files", n) for n in range(4))]
    )
    part = _part(fields, chance, *column)
    if part is None:
        return
    values, at = part
    match chance.randrange(6):
        case 0:
            values[:] = values * chance.choice([2, 3, 100]) if len(values) < 1000 else values
        case 1:
            chance.shuffle(values)
        case 2:
            values.reverse()
        case 3:
            del values[at:]
        case 4:
            values[at] = [values[at]]
        case 5:
            values[:] = [deepcopy(values)]


def _deeper(fields: dict[str, Any], chance: random.Random) -> None:
    """The tree within many others, or with keys that are twice there or of another kind."""
    tree = fields.get("tree")
    for _ in range(chance.choice([1, 5, 59, 64, 70, 200])):
        tree = chance.choice([["l", tree], ["t", tree], ["d", "k", tree], ["x", "codec", tree], ["r", [0, tree]]])
    if chance.random() < 0.3:
        tree = ["d", "k", tree, chance.choice(["k", "l", 1, True, 1.0, None, []]), 0]
    fields["tree"] = tree


def _fewer(fields: dict[str, Any], chance: random.Random) -> None:
    """A field gone, in another place, or one more that nobody knows."""
    name = chance.choice(["shardwright", "save", "tree", "tensors", "files", "digest"])
    match chance.randrange(4):
        case 0:
            fields.pop(name, None)
        case 1 if name in fields:
            fields[name] = fields.pop(name)
        case 2:
            fields[chance.choice(["more", "manager", "", "é", "tensors "])] = deepcopy(chance.choice(OTHERS))
        case 3 if name in fields:
            fields[name] = deepcopy(chance.choice(OTHERS))


def _resize(fields: dict[str, Any], chance: random.Random) -> None:
    """A shape, an itemsize or a file's size that is another, large or small."""
    column = chance.choice([("tensors", 1), ("tensors", 4), ("files", 1), ("files", 2), ("files", 0), ("tensors", 5)])
    part = _part(fields, chance, *column)
    if part is None:
        return
    values, at = part
    old = values[at]
    if isinstance(old, list) and len(old) > 1 and isinstance(old[1], list) and old[1]:
        values, at = old[1], chance.randrange(len(old[1]))
        old = values[at]
    if isinstance(old, int) and not isinstance(old, bool):
        values[at] = chance.choice([old * 2, old * 1000, old + 1, old - 1, -old, 0, 2**40, 2**61, 2**62])


_STRUCTURES = [_spread, _boxes, _longer, _deeper, _fewer, _resize]


def _make_claims_true(fields: dict[str, Any]) -> None:
    """Lets the first file hold what the tensors claim, so that the lie is not found by adding up alone."""
    try:
        _, dtypes, kinds_of_dtype, _, shardings, kinds = fields["tensors"]
        ranks, sizes, headers, _ = fields["files"]
        claimed = 0
        for dtype, kind in zip(kinds_of_dtype, kinds, strict=True):
            volume = dtypes[dtype][1]
            for size in shardings[kind][1]:
                volume *= size
            claimed += volume
        there = sum(size - header for size, header in zip(sizes, headers, strict=True))
        if ranks and sizes[0] + claimed - there > headers[0]:
            sizes[0] += claimed - there
    except (KeyError, IndexError, TypeError, ValueError):
        return
