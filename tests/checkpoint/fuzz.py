"""Mutations of manifests: of their bytes, and of what they say; each with the digest that makes it pass for whole."""

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
