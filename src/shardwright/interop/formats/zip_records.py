"""The records of a zip archive that `torch.save` wrote, alone or inside another file: stored, never compressed.

Only the directory at the end is believed, and only if each record is inside the archive. What a record holds is read by
whoever needs it: of the archive itself, the directory and a few bytes for each record are read.
"""

from __future__ import annotations

import struct
from typing import NamedTuple

from shardwright.errors import CorruptionError, FormatError
from shardwright.interop.formats.stored import Record, read_bytes
from shardwright.storage import Reader

__all__ = ["ZipEntry", "read_directory"]

_TAIL = 1024  # bytes read at once: holds the directory of an archive with one tensor
_MAX_DIRECTORY = 1 << 24  # bytes: 200,000 records
_END = struct.Struct("<4s4H2LH")
_END64 = struct.Struct("<4sQ2H2L4Q")
_LOCATOR64 = struct.Struct("<4sLQL")
_ENTRY = struct.Struct("<4s6H3L5H2L")
_LOCAL = struct.Struct("<4s5H3L2H")


class ZipEntry(NamedTuple):
    """A record of an archive that begins at `base` in its file; `header` is the offset of its header there."""

    name: str
    base: int
    header: int
    nbytes: int
    crc32: int
    end: int  # offset of the directory: no record goes further

    def record(self, reader: Reader, where: str) -> Record:
        """Return the record's range in the file: reads its header, which ends at an offset that the directory lacks."""
        raw = read_bytes(reader, self.base + self.header, _LOCAL.size + len(self.name.encode()))
        signature, _, flags, method, *_, name_size, extra = _LOCAL.unpack_from(raw)
        if (
            signature != b"PK\x03\x04"
            or raw[_LOCAL.size :] != self.name.encode()
            or name_size != len(raw) - _LOCAL.size
        ):
            raise CorruptionError(f"{where}: the header of record {self.name!r} is damaged")
        if method or flags & 1:
            raise FormatError(f"{where}: record {self.name!r} is compressed or encrypted, which torch.save never does")
        start = self.header + len(raw) + extra
        if start + self.nbytes > self.end:
            raise FormatError(f"{where}: record {self.name!r} is outside of its archive")
        return Record(self.name, self.base + start, self.nbytes, self.crc32)


def read_directory(reader: Reader, base: int, length: int, where: str) -> dict[str, ZipEntry]:
    """Return the records of the archive in these bytes of a file, by name."""
    first, tail = _tail(reader, base, length, where)
    count, size, offset = _end(tail, first, length, where)
    if size > _MAX_DIRECTORY or count * _ENTRY.size > size or offset + size > length:
        raise FormatError(f"{where}: its directory of {count} records in {size} bytes at {offset} is not possible")
    directory = (
        tail[offset - first : offset - first + size] if offset >= first else read_bytes(reader, base + offset, size)
    )
    entries: dict[str, ZipEntry] = {}
    at = 0
    for _ in range(count):
        if at + _ENTRY.size > size:
            raise FormatError(f"{where}: its directory ends early")
        entry, at = _entry(directory, at, base, offset, where)
        if entry.name in entries:
            raise FormatError(f"{where}: it has two records {entry.name!r}")
        entries[entry.name] = entry
    if at != size:
        raise FormatError(f"{where}: its directory is longer than its records")
    return entries


def _tail(reader: Reader, base: int, length: int, where: str) -> tuple[int, bytes]:
    if length < _END.size or base < 0 or base + length > reader.size:
        raise CorruptionError(
            f"{where}: {length} bytes at {base} of a file of {reader.size} bytes are not an archive: truncated?"
        )
    first = max(0, length - _TAIL)
    return first, read_bytes(reader, base + first, length - first)


def _end(tail: bytes, first: int, length: int, where: str) -> tuple[int, int, int]:
    """Return the number of records, and the size and the offset of the directory."""
    at = len(tail) - _END.size
    signature, disk, disk_of_directory, here, count, size, offset, comment = _END.unpack_from(tail, at)
    if signature != b"PK\x05\x06" or comment or disk or disk_of_directory or here != count:
        raise CorruptionError(f"{where}: it does not end as an archive of torch.save does: truncated or damaged")
    before = at - _LOCATOR64.size
    if before >= 0 and tail[before : before + 4] == b"PK\x06\x07":
        at_64 = _LOCATOR64.unpack_from(tail, before)[2] - first
        if not 0 <= at_64 <= before - _END64.size or tail[at_64 : at_64 + 4] != b"PK\x06\x06":
            raise CorruptionError(f"{where}: the end of its directory is damaged")
        *_, here, count, size, offset = _END64.unpack_from(tail, at_64)
        if here != count:
            raise CorruptionError(f"{where}: the end of its directory is damaged")
    if offset > length:
        raise FormatError(f"{where}: its directory is outside of it")
    return count, size, offset


def _entry(directory: bytes, at: int, base: int, end: int, where: str) -> tuple[ZipEntry, int]:
    fields = _ENTRY.unpack_from(directory, at)
    flags, method, crc32 = fields[3], fields[4], fields[7]
    packed, nbytes, name_size, extra_size, comment_size, header = (*fields[8:13], fields[16])
    last = at + _ENTRY.size + name_size + extra_size + comment_size
    if fields[0] != b"PK\x01\x02" or last > len(directory):
        raise CorruptionError(f"{where}: its directory is damaged")
    first = at + _ENTRY.size
    try:
        name = directory[first : first + name_size].decode()
    except UnicodeDecodeError:
        raise CorruptionError(f"{where}: its directory is damaged") from None
    packed, nbytes, header = _wide(
        directory[first + name_size : first + name_size + extra_size], packed, nbytes, header
    )
    if method or flags & 1:
        raise FormatError(f"{where}: record {name!r} is compressed or encrypted, which torch.save never does")
    if packed != nbytes or header + _LOCAL.size + name_size + nbytes > end:
        raise FormatError(f"{where}: record {name!r} is outside of its archive")
    return ZipEntry(name, base, header, nbytes, crc32, end), last


def _wide(extra: bytes, *fields: int) -> tuple[int, ...]:
    """Replace the fields that are too large for 32 bits by those of the zip64 extra field."""
    while len(extra) >= 4:
        kind, size = struct.unpack_from("<2H", extra)
        if kind == 1:
            values = iter(struct.unpack_from(f"<{min(size, len(extra) - 4) // 8}Q", extra, 4))
            return tuple(next(values, field) if field == 0xFFFFFFFF else field for field in fields)
        extra = extra[4 + size :]
    return fields
