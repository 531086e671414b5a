"""Write a data file directly from tensor memory, computing checksums on the way; the header comes last.

Contiguous host memory is written without a copy. The rest (strided tensors, device tensors) goes through a window of
bounded size.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, final

import crc32c
import numpy as np
import torch
from torch import Tensor

from shardwright.checkpoint.format.data_file import BLOCK, DataFile, FileEntry, digest
from shardwright.checkpoint.format.split import boxes_of_range
from shardwright.checkpoint.format.tensor_table import Integers
from shardwright.checkpoint.runtime.address_space import memory_at
from shardwright.checkpoint.runtime.parallel import Stop, in_threads, split
from shardwright.checkpoint.runtime.progress import Progress
from shardwright.checkpoint.runtime.windows import window_size
from shardwright.comm.packing import bits
from shardwright.layout import Region
from shardwright.storage import Writer

__all__ = ["Blocks", "FileWriter", "addresses_of", "copy_range"]

_BATCH = 4 << 20  # bytes in one call
_MAX_BUFFERS = 1000  # buffers in one call


@final
class FileWriter:
    """A data file being written: its blocks in any order, the header last.

    `memory` bounds the windows through which strided and device tensors go. The tensors must not change meanwhile.
    """

    def __init__(
        self,
        writer: Writer,
        file: DataFile,
        threads: int = 2,
        progress: Progress | None = None,
        memory: int | None = None,
    ) -> None:
        self._writer, self._file, self._threads, self._progress = writer, file, threads, progress
        self._window, self._windows = window_size(memory, threads)
        self._checksums = np.zeros(int(file.blocks.sum()), np.uint32)

    def put_chunks(self, chunks: Sequence[Tensor]) -> None:
        """Write all chunks of the file, in place where possible."""
        addresses = addresses_of(chunks)
        self.put(Blocks.of(self._file, addresses))
        not_contiguous = np.flatnonzero(addresses < 0)
        in_threads(
            lambda first, last, stop: self._put_through_window(chunks, not_contiguous[first:last], stop),
            split(self._file.plan.nbytes[not_contiguous], self._windows, least=8 * BLOCK),
        )

    def put(self, blocks: Blocks) -> None:
        """Write blocks from host memory."""
        in_threads(
            lambda first, last, stop: self._put_straight(blocks.part(first, last), stop),
            split(blocks.nbytes, self._threads, least=8 * BLOCK),
        )

    def finish(self) -> FileEntry:
        """Write the header and flush the file."""
        header = self._file.header(self._checksums)
        self._writer.write([memoryview(header)], 0)
        self._writer.finish()
        return FileEntry(self._file.size, self._file.header_size, digest(header))

    def _put_straight(self, blocks: Blocks, stop: Stop) -> None:
        batch: list[memoryview] = []
        sums: list[int] = []
        start = next_offset = pending = 0
        for address, offset, nbytes in zip(*(column.tolist() for column in blocks[1:]), strict=True):
            if batch and (offset != next_offset or pending >= _BATCH or len(batch) == _MAX_BUFFERS):
                if stop:
                    return
                self._write(batch, start, pending)
                batch, pending = [], 0
            if not batch:
                start = offset
            view = memory_at(address, nbytes)
            sums.append(crc32c.crc32c(view))
            batch.append(view)
            pending += nbytes
            next_offset = offset + nbytes
        if batch:
            self._write(batch, start, pending)
        self._checksums[blocks.numbers] = sums

    def _put_through_window(self, chunks: Sequence[Tensor], numbers: Integers, stop: Stop) -> None:
        file, window = self._file, torch.empty(self._window, dtype=torch.uint8)
        for chunk in numbers.tolist():
            nbytes, number = int(file.plan.nbytes[chunk]), int(file.first_blocks[chunk])
            for begin in range(0, nbytes, self._window):
                if stop:
                    return
                length = min(self._window, nbytes - begin)
                copy_range(window, chunks[chunk], begin, length)
                views = [memory_at(window.data_ptr() + at, min(BLOCK, length - at)) for at in range(0, length, BLOCK)]
                first = number + begin // BLOCK
                self._checksums[first : first + len(views)] = [crc32c.crc32c(view) for view in views]
                self._write(views, file.header_size + int(file.plan.starts[chunk]) + begin, length)

    def _write(self, batch: Sequence[memoryview], start: int, nbytes: int) -> None:
        self._writer.write(batch, start)
        if self._progress is not None:
            self._progress(nbytes)


def addresses_of(chunks: Sequence[Tensor]) -> Integers:
    """Return the address of each chunk, or -1 if it is not contiguous host memory.

    >>> addresses_of([torch.ones(2, 2).t()]).tolist()
    [-1]
    """
    return np.array([_address(chunk) for chunk in chunks], np.int64)


def _address(chunk: Tensor) -> int:
    if chunk.device.type != "cpu" or not chunk.is_contiguous() or chunk.is_conj() or chunk.is_neg():
        return -1
    return chunk.data_ptr()


class Blocks(NamedTuple):
    """Blocks in host memory, in the order of the file: their indices, addresses and offsets in the file, and sizes."""

    numbers: Integers
    addresses: Integers
    offsets: Integers
    nbytes: Integers

    @classmethod
    def of(cls, file: DataFile, addresses: Integers) -> Blocks:
        """Return the blocks of the chunks at these addresses; those below 0 are left out."""
        chunks = np.flatnonzero(addresses >= 0)
        counts = file.blocks[chunks]
        chunk = np.repeat(chunks, counts)
        number = np.arange(len(chunk)) - np.repeat(np.cumsum(counts) - counts, counts)
        within = number * BLOCK
        return cls(
            file.first_blocks[chunk] + number,
            addresses[chunk] + within,
            file.header_size + file.plan.starts[chunk] + within,
            np.minimum(BLOCK, file.plan.nbytes[chunk] - within),
        )

    def part(self, first: int, last: int) -> Blocks:
        """Return blocks `first` to `last` (exclusive)."""
        return Blocks(*(column[first:last] for column in self))


def copy_range(window: Tensor, chunk: Tensor, begin: int, nbytes: int, *, wait: bool = True) -> None:
    """Copy a range of a chunk's bytes, in row-major order, to the start of a window.

    With `wait=False`, a copy from a GPU is only enqueued on the current stream.

    >>> window = torch.zeros(4, dtype=torch.uint8)
    >>> copy_range(window, torch.tensor([[1, 2], [3, 4]], dtype=torch.uint8).t(), 1, 2)
    >>> window.tolist()
    [3, 2, 0, 0]
    """
    chunk = chunk.detach()
    position, first = 0, begin // chunk.itemsize
    for box in boxes_of_range(Region.whole(chunk.shape), first, first + nbytes // chunk.itemsize):
        data = bits(chunk[box.slices()].resolve_conj().resolve_neg())  # of the box alone, as it may be a copy
        target = window[:nbytes].view(data.dtype)
        target[position : position + box.volume].view(box.size).copy_(data, non_blocking=not wait)
        position += box.volume
