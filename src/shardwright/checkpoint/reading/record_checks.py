"""The CRC-32 of records that are read in pieces, in any order, by several threads and ranks."""

from __future__ import annotations

import threading
from collections.abc import Iterable
from functools import cache
from typing import NamedTuple, final

from shardwright.errors import CorruptionError
from shardwright.interop.formats import Record

__all__ = ["Piece", "RecordChecks", "combined"]

_POLYNOMIAL = 0xEDB88320


class Piece(NamedTuple):
    """A range of a file that was read, the record that it is part of, and the CRC-32 of the range."""

    record: Record
    begin: int
    end: int
    crc32: int


@final
class RecordChecks:
    """Collects the pieces of records of one file, and checks a record once all of it was read.

    >>> import zlib
    >>> checks = RecordChecks("weights.pt")
    >>> record = Record("data/0", 100, 6, zlib.crc32(b"foobar"))
    >>> checks.add(Piece(record, 103, 106, zlib.crc32(b"bar")))
    >>> len(checks.open_pieces())
    1
    >>> checks.add(Piece(record, 100, 103, zlib.crc32(b"foo")))
    >>> checks.open_pieces()
    []
    """

    def __init__(self, file: str) -> None:
        self._file = file
        self._lock = threading.Lock()
        self._pieces: dict[int, dict[tuple[int, int], Piece]] = {}  # by the start of their record
        self._missing: dict[int, int] = {}  # bytes of each record that were not read

    def add(self, piece: Piece) -> None:
        """Add a piece; raise `CorruptionError` if it completes a record that does not match its checksum."""
        record = piece.record
        with self._lock:
            pieces = self._pieces.setdefault(record.start, {})
            if (piece.begin, piece.end) in pieces:  # two tensors are one
                return
            pieces[piece.begin, piece.end] = piece
            missing = self._missing.get(record.start, record.nbytes) - (piece.end - piece.begin)
            self._missing[record.start] = missing
            if missing > 0:
                return
            del self._pieces[record.start], self._missing[record.start]
            # Pieces that overlap cannot be combined: `verify` reads such a record from one end to the other.
            whole = _joined(record, pieces.values())
        if whole is not None and whole != record.crc32:
            raise CorruptionError(
                f"{self._file} is corrupted: record {record.name!r}, bytes {record.start} to "
                f"{record.start + record.nbytes}, does not match its CRC-32"
            )

    def open_pieces(self) -> list[Piece]:
        """Return the pieces of records of which something was not read."""
        with self._lock:
            return [piece for pieces in self._pieces.values() for piece in pieces.values()]


def _joined(record: Record, pieces: Iterable[Piece]) -> int | None:
    """Return the CRC-32 of a record from those of its pieces; None if they overlap or leave a gap."""
    at, whole = record.start, 0
    for _, begin, end, crc32 in sorted(pieces, key=lambda piece: piece.begin):
        if begin != at:
            return None
        at, whole = end, combined(whole, crc32, end - begin)
    return whole if at == record.start + record.nbytes else None


def combined(first: int, second: int, nbytes: int) -> int:
    """Return the CRC-32 of two ranges, one after the other, from theirs; the second has `nbytes` bytes.

    >>> import zlib
    >>> combined(zlib.crc32(b"foo"), zlib.crc32(b"bar"), 3) == zlib.crc32(b"foobar")
    True
    """
    power = 0
    while nbytes:
        if nbytes & 1:
            first = _apply(_zeros(power), first)
        nbytes >>= 1
        power += 1
    return first ^ second


@cache
def _zeros(power: int) -> tuple[int, ...]:
    """Return the matrix over GF(2) that appends 2^power zero bytes, as the images of the 32 bits."""
    if power == 0:
        images = []
        for bit in range(32):
            value = 1 << bit
            for _ in range(8):
                value = value >> 1 ^ (_POLYNOMIAL if value & 1 else 0)
            images.append(value)
        return tuple(images)
    half = _zeros(power - 1)
    return tuple(_apply(half, image) for image in half)


def _apply(matrix: tuple[int, ...], vector: int) -> int:
    result = 0
    bit = 0
    while vector:
        if vector & 1:
            result ^= matrix[bit]
        vector >>= 1
        bit += 1
    return result
