"""The header of a safetensors file that anybody may have written: nothing in it is believed unchecked."""

from __future__ import annotations

import json
import struct
from math import prod
from typing import Any, NamedTuple

import torch

from shardwright.errors import CorruptionError, FormatError
from shardwright.interop.formats.stored import read_bytes
from shardwright.storage import Reader

__all__ = ["SAFETENSORS_DTYPES", "HeaderEntry", "SafetensorsHeader", "read_header", "unique_names"]

_MAX_HEADER = 1 << 25  # bytes: 200,000 tensors; parsing takes ten times as much memory
_MAX_DIMENSIONS = 64
_MAX_SIZE = 1 << 62
_HALVES = "F4"  # two elements share a byte

SAFETENSORS_DTYPES: dict[str, torch.dtype] = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "F8_E4M3FNUZ": torch.float8_e4m3fnuz,
    "F8_E5M2FNUZ": torch.float8_e5m2fnuz,
    "F8_E8M0": torch.float8_e8m0fnu,
    "F4": torch.float4_e2m1fn_x2,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U64": torch.uint64,
    "U32": torch.uint32,
    "U16": torch.uint16,
    "U8": torch.uint8,
    "BOOL": torch.bool,
    "C64": torch.complex64,
}
"""The dtypes of safetensors. A `float4_e2m1fn_x2` element of PyTorch is a pair of F4 elements."""


class HeaderEntry(NamedTuple):
    """A tensor of a file: its dtype and shape as PyTorch has them, and its range in the file."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    start: int
    end: int


class SafetensorsHeader(NamedTuple):
    """The tensors of a file, by name, its metadata, and where the data ends."""

    tensors: dict[str, HeaderEntry]
    metadata: dict[str, str]
    end: int


def read_header(reader: Reader, base: int, where: str) -> SafetensorsHeader:
    """Return the header at an offset of an open file, and check that it describes the rest of the file exactly."""
    available = reader.size - base
    if available < 10:
        raise CorruptionError(f"{where} is not a safetensors file: it has {available} bytes")
    (length,) = struct.unpack("<Q", read_bytes(reader, base, 8))
    if 8 + length > available:
        raise CorruptionError(f"{where}: its header has {length} bytes, but {available - 8} follow: truncated?")
    if length > _MAX_HEADER:
        raise FormatError(f"{where}: its header has {length} bytes, and at most {_MAX_HEADER} are read")
    try:
        parsed = json.loads(read_bytes(reader, base + 8, length), object_pairs_hook=unique_names)
    except (ValueError, RecursionError) as error:
        raise CorruptionError(f"{where}: its header cannot be read: {error}") from None
    if not isinstance(parsed, dict):
        raise FormatError(f"{where}: its header is not a JSON object")
    metadata = parsed.pop("__metadata__", {})
    if not isinstance(metadata, dict) or not all(isinstance(value, str) for value in metadata.values()):
        raise FormatError(f"{where}: its __metadata__ is not an object of texts")
    begin = base + 8 + length
    tensors = {name: _entry(entry, begin, f"{where}: tensor {name!r}") for name, entry in parsed.items()}
    _check_ranges(tensors, begin, reader.size, where)
    return SafetensorsHeader(tensors, metadata, reader.size)


def unique_names(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Return the members of a JSON object; raise ValueError if a name occurs twice.

    >>> unique_names([("a", 1), ("b", 2)])
    {'a': 1, 'b': 2}
    """
    result: dict[str, Any] = {}
    for name, value in pairs:
        if name in result:
            raise ValueError(f"{name!r} occurs twice: it is listed twice in one object")
        result[name] = value
    return result


def _entry(entry: Any, begin: int, where: str) -> HeaderEntry:
    match entry:
        case {"dtype": str(name), "shape": list(shape), "data_offsets": [int(first), int(last)], **rest} if not rest:
            pass
        case _:
            raise FormatError(f"{where} is not described by dtype, shape and data_offsets alone")
    dtype = SAFETENSORS_DTYPES.get(name)
    if dtype is None:
        raise FormatError(f"{where} has the dtype {name[:40]!r}, which is not known")
    if len(shape) > _MAX_DIMENSIONS or not all(type(size) is int and 0 <= size <= _MAX_SIZE for size in shape):
        raise FormatError(f"{where} has an invalid shape: {str(shape)[:200]}")
    if name == _HALVES:
        if not shape or shape[-1] % 2:
            raise FormatError(f"{where} is of F4, two elements to a byte, and its last dimension is odd: {shape}")
        shape = [*shape[:-1], shape[-1] // 2]
    nbytes = prod(shape) * dtype.itemsize
    if not 0 <= first <= last or last - first != nbytes:
        raise FormatError(f"{where} needs {nbytes} bytes, but its data_offsets are {first} to {last}")
    return HeaderEntry(dtype, tuple(shape), begin + first, begin + last)


def _check_ranges(tensors: dict[str, HeaderEntry], begin: int, end: int, where: str) -> None:
    """Raise unless the tensors fill the data of the file, without gaps and overlaps."""
    at = begin
    for name, entry in sorted(tensors.items(), key=lambda item: (item[1].start, item[1].end)):
        if entry.start != at:
            what = "overlaps with another" if entry.start < at else f"is after a gap of {entry.start - at} bytes"
            raise FormatError(f"{where}: tensor {name!r} {what}")
        at = entry.end
    if at != end:
        what = "truncated" if at > end else "longer than its tensors"
        raise CorruptionError(f"{where} is {what}: its tensors end at byte {at}, and it has {end} bytes")
