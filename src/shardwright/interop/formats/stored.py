"""Where others store tensors: files, and in them byte ranges with strides and checksums.

A file's chunks are planned as ours are, by `FilePlan`, so that the same code reads them. Their offsets may be known
only once the file is opened: the entries of a distributed checkpoint are archives of their own.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cached_property
from typing import NamedTuple, TypeAlias, final

import numpy as np

from shardwright.checkpoint.format.data_file import BLOCK
from shardwright.checkpoint.format.tensor_table import Integers
from shardwright.checkpoint.format.write_layout import FilePlan
from shardwright.storage import Reader

__all__ = ["ArchiveRange", "Find", "ForeignFile", "Location", "Record", "read_bytes"]


class Record(NamedTuple):
    """Bytes of a file under one CRC-32, and their name for messages.

    >>> Record("archive/data/0", start=64, nbytes=16, crc32=0).nbytes
    16
    """

    name: str
    start: int
    nbytes: int
    crc32: int


class Location(NamedTuple):
    """Where a chunk is stored: the offset of its first element in the file, and the record that holds it, if any.

    `strides` are those of its elements, in elements; None if they are row-major without gaps. `span` is the number of
    bytes from the first to the last.

    >>> Location(start=64, span=16).strides is None
    True
    """

    start: int
    span: int
    strides: tuple[int, ...] | None = None
    record: Record | None = None


class ArchiveRange(NamedTuple):
    """Bytes of a file that are an archive of `torch.save`, and the name of what it holds; empty for the whole file."""

    start: int
    nbytes: int
    name: str


Find: TypeAlias = Callable[[Reader], Location]
"""Finds a chunk in its open file."""


@final
class ForeignFile:
    """A file of another format: its name, the chunks that it holds, and where they are.

    `archives` are those that `torch.save` wrote into it. `least_size` is the size that it must have at least.

    >>> import tempfile, torch
    >>> from shardwright.interop.formats import read_foreign
    >>> from shardwright.storage import LocalStorage
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     torch.save({"w": torch.ones(2)}, f"{folder}/state.pt")
    ...     [file.name for file in read_foreign(LocalStorage(folder)).files.values()]
    ['state.pt']
    """

    def __init__(
        self,
        name: str,
        plan: FilePlan,
        locations: Sequence[Location | Find],
        archives: Sequence[ArchiveRange] = (),
        least_size: int = 0,
    ) -> None:
        self.name, self.plan, self.least_size = name, plan, least_size
        self.archives = archives
        self._locations = list(locations)

    @cached_property
    def blocks(self) -> Integers:
        """The number of blocks of each chunk."""
        return -(-self.plan.nbytes // BLOCK)

    @cached_property
    def first_blocks(self) -> Integers:
        """The index of each chunk's first block among the blocks of the file."""
        return np.cumsum(self.blocks) - self.blocks

    def locate(self, chunk: int, reader: Reader) -> Location:
        """Return where a chunk is in the open file."""
        found = self._locations[chunk]
        if not isinstance(found, Location):
            found = self._locations[chunk] = found(reader)
        return found


def read_bytes(reader: Reader, start: int, nbytes: int) -> bytes:
    """Return a range of an open file."""
    data = bytearray(nbytes)
    if nbytes:
        reader.read([memoryview(data)], start)
    return bytes(data)
