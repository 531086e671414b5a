"""An archive that `torch.save` wrote: its pickle as inert values, and its storages as records with checksums."""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from math import prod
from typing import Any, final

from shardwright.errors import CorruptionError, FormatError
from shardwright.interop.formats.pickled import STATE, read_pickle
from shardwright.interop.formats.pickled.values import StorageRef, TensorRef, storage_of
from shardwright.interop.formats.stored import Location, Record, read_bytes
from shardwright.interop.formats.zip_records import read_directory
from shardwright.storage import Reader

__all__ = ["Archive", "locate", "row_major"]

_MAX_PICKLE = 1 << 27
_MAX_EXPANSION = 1 << 10  # a tensor may be this many times larger than the bytes that are stored for it


@final
class Archive:
    """The archive in a range of an open file. `value` has `TensorRef`s in place of tensors; nothing else is read.

    >>> import tempfile, torch
    >>> from shardwright.storage import LocalStorage
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     torch.save({"step": 3}, f"{folder}/state.pt")
    ...     with LocalStorage(folder).open_file("state.pt") as reader:
    ...         Archive(reader, 0, reader.size, "state.pt").value
    {'step': 3}
    """

    def __init__(self, reader: Reader, base: int, length: int, where: str) -> None:
        self._reader, self._where = reader, where
        self._entries = read_directory(reader, base, length, where)
        pickles = [name for name in self._entries if name.count("/") == 1 and name.endswith("/data.pkl")]
        if len(pickles) != 1:
            raise FormatError(f"{where}: an archive without one data.pkl is not one of torch.save")
        self._prefix = pickles[0].removesuffix("data.pkl")
        if f"{self._prefix}constants.pkl" in self._entries:
            raise FormatError(f"{where}: a TorchScript archive is a program, not a checkpoint; save its state_dict()")
        self._check_byte_order()
        self._locations: dict[str, Record] = {}
        self.value: Any = read_pickle(self._contents("data.pkl", _MAX_PICKLE), STATE, where, persistent=storage_of)

    def _check_byte_order(self) -> None:
        if f"{self._prefix}byteorder" in self._entries:
            order = self._contents("byteorder", 16)
            if order != b"little":
                raise FormatError(f"{self._where}: its byte order is {order!r}, and only little-endian is read")

    def _contents(self, name: str, limit: int) -> bytes:
        """Return a record, with its checksum verified."""
        entry = self._entries[self._prefix + name]
        if entry.nbytes > limit:
            raise FormatError(f"{self._where}: record {name!r} has {entry.nbytes} bytes, and at most {limit} are read")
        record = entry.record(self._reader, self._where)
        data = read_bytes(self._reader, record.start, record.nbytes)
        if zlib.crc32(data) != record.crc32:
            raise CorruptionError(f"{self._where}: record {entry.name!r} does not match its CRC-32")
        return data

    def record_of(self, storage: StorageRef) -> Record:
        """Return the record of a storage, of exactly its size."""
        record = self._locations.get(storage.key)
        if record is None:
            entry = self._entries.get(f"{self._prefix}data/{storage.key}")
            if entry is None:
                raise CorruptionError(f"{self._where}: storage {storage.key!r} has no record")
            record = self._locations[storage.key] = entry.record(self._reader, self._where)
        nbytes = storage.numel * storage.dtype.itemsize
        if record.nbytes != nbytes:
            raise CorruptionError(f"{self._where}: {record.name!r} has {record.nbytes} bytes, but its storage {nbytes}")
        return record

    def locate(self, tensor: TensorRef) -> Location:
        """Return where a tensor is in the file."""
        return locate(tensor, self.record_of(tensor.storage))

    def checksums(self) -> dict[str, int]:
        """Return the checksum of every record, by name."""
        return {name: entry.crc32 for name, entry in self._entries.items()}

    def records(self) -> list[Record]:
        """Return all records of the archive."""
        return [entry.record(self._reader, self._where) for entry in self._entries.values()]


def locate(tensor: TensorRef, record: Record) -> Location:
    """Return where a tensor is, given the record of its storage."""
    itemsize = tensor.dtype.itemsize
    elements = 1 + sum((n - 1) * step for n, step in zip(tensor.size, tensor.stride, strict=True))
    span = 0 if 0 in tensor.size else elements * itemsize
    strides = None if row_major(tensor.size, tensor.stride) else tensor.stride
    if prod(tensor.size) * itemsize > _MAX_EXPANSION * max(span, 1 << 20):
        raise FormatError(
            f"record {record.name!r}: a tensor of sizes {list(tensor.size)[:8]} repeats its {span} bytes too often"
        )
    return Location(record.start + tensor.offset * itemsize, span, strides, record)


def row_major(size: Sequence[int], stride: Sequence[int]) -> bool:
    """Return True if elements of these strides are in row-major order, without gaps.

    >>> row_major((2, 3), (3, 1)), row_major((2, 3), (1, 2)), row_major((1, 3), (7, 1))
    (True, False, True)
    """
    if prod(size) == 0:
        return True
    expected = 1
    for extent, step in zip(reversed(size), reversed(stride), strict=True):
        if extent != 1 and step != expected:
            return False
        expected *= extent
    return True
