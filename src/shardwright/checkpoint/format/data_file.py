"""The header of a data file: a safetensors header, known before any data is written, with a checksum for every block.

The checksums come first, at a fixed offset, as eight hexadecimal digits each, so the length of the header does not
depend on them, and they can be read without parsing it. The header is padded with spaces, so that the data begins on a
page boundary.
"""

from __future__ import annotations

import hashlib
import re
import struct
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple, final

import msgspec
import numpy as np
import numpy.typing as npt

from shardwright.checkpoint.format.tensor_table import Integers
from shardwright.checkpoint.format.write_layout import FilePlan
from shardwright.errors import FormatError
from shardwright.layout import Region

__all__ = ["BLOCK", "MAX_HEADER", "PAGE", "SAFETENSORS_DTYPES", "START", "DataFile", "FileEntry", "digest", "file_name"]

BLOCK = 1 << 20
"""Bytes under one checksum; the last block of a chunk may be shorter."""
PAGE = 4096
MAX_HEADER = 100_000_000
"""Maximum size of a header, without the eight bytes of its length: safetensors does not read longer ones."""
START = b'{"__metadata__":{"crc32c":"'
"""The first bytes of every header, after its length."""
_SPECIAL = re.compile(r'["\\\x00-\x1f\]]|__metadata__')  # characters and names that need escaping or are reserved
SAFETENSORS_DTYPES = {
    "float64": "F64",
    "float32": "F32",
    "float16": "F16",
    "bfloat16": "BF16",
    "float8_e4m3fn": "F8_E4M3",
    "float8_e5m2": "F8_E5M2",
    "float8_e4m3fnuz": "F8_E4M3FNUZ",
    "float8_e5m2fnuz": "F8_E5M2FNUZ",
    "float8_e8m0fnu": "F8_E8M0",
    "int64": "I64",
    "int32": "I32",
    "int16": "I16",
    "int8": "I8",
    "uint8": "U8",
    "uint16": "U16",
    "uint32": "U32",
    "uint64": "U64",
    "bool": "BOOL",
    "complex64": "C64",
}
"""The names that safetensors has for dtypes. Those that it does not have are stored as bytes."""


class FileEntry(NamedTuple):
    """The manifest's entry for a data file: its size, and the size and digest of its header.

    >>> FileEntry(8192, 4096, "0" * 32).size
    8192
    """

    size: int
    header_size: int
    digest: str


@final
@dataclass(frozen=True)
class DataFile:
    """The data file of one rank in one save: its name, its header without the checksums, and its offsets."""

    plan: FilePlan
    save_id: str

    @property
    def name(self) -> str:
        """The name of the file, unique to the save."""
        return file_name(self.save_id, self.plan.rank)

    @cached_property
    def blocks(self) -> Integers:
        """The number of blocks of each chunk."""
        return -(-self.plan.nbytes // BLOCK)

    @cached_property
    def first_blocks(self) -> Integers:
        """The index of each chunk's first block among the blocks of the file."""
        return np.cumsum(self.blocks) - self.blocks

    def in_save(self, save_id: str) -> DataFile:
        """Return the file of the same plan in another save, reusing what does not depend on the save."""
        file = DataFile(self.plan, save_id)
        file.__dict__.update(blocks=self.blocks, first_blocks=self.first_blocks, _entries=self._entries)
        return file

    @cached_property
    def _rest(self) -> bytes:
        """The header after the checksums, without padding."""
        return f'","format":"pt","shardwright":"1","save":"{self.save_id}"}}'.encode() + self._entries

    @cached_property
    def _entries(self) -> bytes:
        """The entries of the chunks in the header."""
        plan, table = self.plan, self.plan.table
        names, dtypes, kinds = table.names, table.dtypes, table.kinds.tolist()
        is_plain = not _SPECIAL.search("".join(names))
        descriptions: dict[tuple[int, str, int], tuple[str, str]] = {}  # by kind; of split chunks, by chunk
        entries = [""]
        for chunk, (tensor, start, nbytes) in enumerate(
            zip(plan.tensors.tolist(), plan.starts.tolist(), plan.nbytes.tolist(), strict=True)
        ):
            name, kind = names[tensor], (kinds[tensor], dtypes[tensor], chunk if chunk in plan.boxes else -1)
            description = descriptions.get(kind)
            if description is None:
                description = descriptions[kind] = self._describe(chunk, tensor)
            ranges, entry = description
            if is_plain:
                key = f'"{name}{ranges}"'
            else:
                key = _quoted(name + (ranges or (_ranges(plan.region(chunk)) if _is_reserved(name) else "")))
            entries.append(f"{key}:{entry}{start},{start + nbytes}]}}")
        return (",".join(entries) + "}").encode()

    def _describe(self, chunk: int, tensor: int) -> tuple[str, str]:
        """Return the suffix of a chunk's key after the tensor's name, and its entry up to the offsets."""
        table, region = self.plan.table, self.plan.region(chunk)
        dtype, size = SAFETENSORS_DTYPES.get(table.dtypes[tensor]), region.size
        if dtype is None:  # stored as bytes, with an extra dimension for them; the manifest has the dtype
            dtype, size = "U8", (*size, int(table.itemsizes[tensor]))
        ranges = "" if region.size == table.shape(tensor) else _ranges(region)
        return ranges, f'{{"dtype":"{dtype}","shape":[{",".join(map(str, size))}],"data_offsets":['

    @cached_property
    def header_size(self) -> int:
        """The number of bytes before the data: eight for the length, the header, and its padding."""
        used = 8 + len(START) + 8 * int(self.blocks.sum()) + len(self._rest)
        padded = -(-used // PAGE) * PAGE
        if padded - 8 > MAX_HEADER:
            raise FormatError(
                f"{self.name}: {len(self.plan.tensors)} chunks in {self.blocks.sum()} blocks need a header of "
                f"{padded - 8} bytes, but safetensors allows at most {MAX_HEADER}; save with more ranks"
            )
        return padded

    @property
    def size(self) -> int:
        """The size of the file in bytes."""
        return self.header_size + self.plan.size

    def header(self, checksums: npt.NDArray[np.uint32]) -> bytes:
        """Return the bytes before the data, given the checksums of all blocks in order."""
        text = START + checksums.astype(">u4").tobytes().hex().encode() + self._rest
        return struct.pack("<Q", self.header_size - 8) + text.ljust(self.header_size - 8)

    @property
    def checksums_start(self) -> int:
        """The offset in the file at which the checksums begin."""
        return 8 + len(START)

    def checksums(self, header: bytes) -> npt.NDArray[np.uint32]:
        """Return the checksums in a header whose digest was verified.

        Everything else in a header follows from the manifest, so it is compared, not parsed.
        """
        first = self.checksums_start
        try:
            text = header[first : first + 8 * int(self.blocks.sum())].decode("ascii")
            checksums = np.frombuffer(bytes.fromhex(text), ">u4").astype(np.uint32)
        except ValueError:
            checksums = np.empty(0, np.uint32)
        if len(checksums) != self.blocks.sum() or self.header(checksums) != header:
            raise FormatError(f"{self.name}: its header does not match the manifest")
        return checksums


def file_name(save_id: str, rank: int) -> str:
    """Return the name of a rank's file in a save.

    >>> file_name("5f3a9c", 12)
    '5f3a9c-00012-0.safetensors'
    """
    return f"{save_id}-{rank:05d}-0.safetensors"


def digest(data: bytes) -> str:
    """Return the 128-bit BLAKE2b digest of some bytes, as hexadecimal digits.

    >>> digest(b"")
    'cae66941d9efbd404e4d88758ea67670'
    """
    return hashlib.blake2b(data, digest_size=16).hexdigest()


def _ranges(region: Region) -> str:
    return f"@[{','.join(f'{a}:{b}' for a, b in zip(region.offset, region.end, strict=True))}]"


def _is_reserved(name: str) -> bool:
    """Return True if a name is reserved or looks like the key of a chunk: its tensor is stored like a chunk."""
    if name == "__metadata__":
        return True
    if not name.endswith("]"):
        return False
    _, at, ranges = name.rpartition("@[")
    return bool(at) and not set(ranges[:-1]) - set("0123456789:,")


def _quoted(text: str) -> str:
    quoted: Any = msgspec.json.encode(text)
    return str(quoted, "utf-8")
