"""The record of the collectives that this rank has started in a group.

Every point-to-point message has a tag computed from its number, the kind of its operation and its size. Ranks in step
compute the same tags without communication; a message of another operation or size never matches, so a rank that is out
of step waits, and is reported (see watch.py), instead of receiving the data of another operation.
"""

from __future__ import annotations

import threading
import zlib
from collections import deque
from collections.abc import Hashable, Iterator
from contextlib import contextmanager
from typing import NamedTuple, final

__all__ = ["Entry", "Ledger", "code", "current_tensor", "moving_tensor", "of_tensor", "tag"]

_RECENT = 64

# Odd factors, so that two messages that differ only in number, or only in size, never share a tag.
_PER_NUMBER, _PER_BYTE, _PER_TENSOR = 0x1E3779B1, 0x05EBCA6B, 0x27D4EB2F
_BITS = (1 << 30) - 1
_OURS = 1 << 30  # smaller tags are left to the user's own messages

_codes: dict[Hashable, int] = {}


def code(kind: Hashable) -> int:
    """Return a hash of a kind of operation, the same in every process.

    >>> code(("all_gather", "float32")) == code(("all_gather", "float32")) != code(("all_gather", "int32"))
    True
    """
    known = _codes.get(kind)
    if known is None:
        known = _codes[kind] = zlib.crc32(repr(kind).encode())
    return known


class _Moving(threading.local):
    tensor = 0


_moving = _Moving()


@contextmanager
def moving_tensor(number: int) -> Iterator[None]:
    """Add the number of a tensor to the tags of this thread's messages; 0 for tensors without a number.

    Messages of two tensors with the same shape and layout have the same kind and size. With the numbers in the tags, a
    rank that gathers one of them never receives the data of a rank that gathers the other.

    >>> with moving_tensor(3):
    ...     current_tensor()
    3
    >>> current_tensor()
    0
    """
    before, _moving.tensor = _moving.tensor, number
    try:
        yield
    finally:
        _moving.tensor = before


def current_tensor() -> int:
    """Return the number of the tensor that this thread communicates, or 0."""
    return _moving.tensor


def of_tensor(kind: int, tensor: int) -> int:
    """Return the hash of a kind of operation (see `code`) on a numbered tensor.

    >>> of_tensor(7, 0), of_tensor(7, 1) != of_tensor(7, 2)
    (7, True)
    """
    return kind + tensor * _PER_TENSOR


def tag(number: int, kind: int, nbytes: int) -> int:
    """Return the tag of a message from its number, the hash of its kind (see `code`) and its size.

    >>> tag(1, 7, 8) != tag(2, 7, 8) != tag(2, 7, 12)
    True
    """
    return (number * _PER_NUMBER + nbytes * _PER_BYTE + kind) & _BITS | _OURS


class Entry(NamedTuple):
    """A collective that this rank has started: its number, and a description that is equal on all ranks in step.

    >>> Entry(3, "all_gather", ("float32", (2, 2)), {}).number
    3
    """

    number: int
    kind: str
    details: tuple[object, ...]
    sent: dict[int, int]  # bytes by peer, if each rank knows only its own sizes


@final
class Ledger:
    """The operations that this rank has started in one group.

    Collectives have the same number on all ranks of the group. Messages of `exchange` concern only two ranks and are
    numbered per peer and direction.

    >>> ledger = Ledger()
    >>> ledger.begin("all_gather", ("float32", (2, 2))), ledger.begin("all_reduce", ("float32", (4,)))
    (1, 2)
    >>> [entry.kind for entry in ledger.recent]
    ['all_gather', 'all_reduce']
    """

    __slots__ = ("count", "messages", "received", "recent", "sent", "tensors")

    def __init__(self) -> None:
        self.count = 0
        self.recent: deque[Entry] = deque(maxlen=_RECENT)
        self.sent: dict[int, int] = {}
        self.received: dict[int, int] = {}
        self.tensors: dict[Hashable, int] = {}
        self.messages: deque[tuple[int, int, int]] = deque(maxlen=_RECENT)  # most recently sent: peer, number, bytes

    def begin(self, kind: str, details: tuple[object, ...], sent: dict[int, int] | None = None) -> int:
        """Record the next collective of the group and return its number."""
        self.count = number = self.count + 1
        self.recent.append(Entry(number, kind, details, sent or {}))
        return number

    def send(self, peer: int, nbytes: int) -> int:
        """Record the next message of `exchange` to a peer and return its number."""
        number = self.sent.get(peer, 0) + 1
        self.sent[peer] = number
        self.messages.append((peer, number, nbytes))
        return number

    def receive(self, peer: int) -> int:
        """Record the next message of `exchange` expected from a peer and return its number."""
        number = self.received.get(peer, 0) + 1
        self.received[peer] = number
        return number

    def number_tensor(self, mesh: Hashable) -> int:
        """Return a number for the next tensor that is distributed over a mesh, see `moving_tensor`.

        >>> Ledger().number_tensor("mesh")
        1
        """
        number = self.tensors.get(mesh, 0) + 1
        self.tensors[mesh] = number
        return number
