"""Read data files directly into tensor memory, and verify every block while it is in the cache.

A block that is wanted in full, and whose destination is contiguous, is read in place. Others (the edges of a slice,
columns of a matrix) are read into a window, verified, and copied from it. No byte is used before it is verified.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator, Sequence
from typing import NamedTuple, Protocol, TypeAlias

import crc32c
import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from shardwright.checkpoint.format.data_file import BLOCK, DataFile, FileEntry, digest
from shardwright.checkpoint.format.locate import Part
from shardwright.checkpoint.format.split import boxes_of_range
from shardwright.checkpoint.format.tensor_table import Integers
from shardwright.checkpoint.format.write_layout import FilePlan
from shardwright.checkpoint.reading.host_sharing import Run, blocks_of_part
from shardwright.checkpoint.runtime.address_space import memory_at
from shardwright.checkpoint.runtime.parallel import Stop, in_threads, split
from shardwright.checkpoint.runtime.progress import Progress
from shardwright.checkpoint.runtime.windows import window_size
from shardwright.comm.packing import bits
from shardwright.errors import CorruptionError
from shardwright.layout import Region
from shardwright.storage import Reader

__all__ = ["Destination", "FileReader", "ReadableFile", "copy_window"]

Checksums: TypeAlias = npt.NDArray[np.uint32]

_BATCH = 1 << 20  # bytes read in one call and verified at once, while they are in the cache
_MAX_BUFFERS = 1000  # buffers in one call


class Destination(NamedTuple):
    """The destination of a part of a chunk: `tensor`, which holds the region `frame` of the global tensor.

    `stored` is the dtype in the file. `is_straight` is True if the tensor is known to be contiguous host memory in the
    stored byte order.
    """

    part: Part
    tensor: Tensor
    frame: Region
    stored: torch.dtype
    is_straight: bool = False

    @property
    def is_plain(self) -> bool:
        """True if the stored bytes are those of the tensor, so that they can be copied without conversion."""
        tensor = self.tensor
        return tensor.dtype is self.stored and not tensor.is_conj() and not tensor.is_neg()


class _Blocks(NamedTuple):
    """Blocks to read directly into memory: their indices and offsets in the file, and addresses."""

    numbers: Integers
    offsets: Integers
    addresses: Integers
    nbytes: Integers


class _Window(NamedTuple):
    """Adjacent blocks of a chunk to read into a window, and the destination to copy them to."""

    destination: Destination
    first: int  # index of its first block within the chunk
    blocks: int


class ReadableFile(Protocol):
    """What reading needs to know of a file: its chunks, and how many blocks each has."""

    @property
    def name(self) -> str:
        """The name of the file."""

    @property
    def plan(self) -> FilePlan:
        """The chunks of the file."""

    @property
    def blocks(self) -> Integers:
        """The number of blocks of each chunk."""

    @property
    def first_blocks(self) -> Integers:
        """The index of each chunk's first block among the blocks of the file."""


class FileReader:
    """An open data file whose header was verified."""

    file: ReadableFile
    _starts: Integers  # the offset of each chunk in the file

    def __init__(self, reader: Reader, file: DataFile, expected: FileEntry) -> None:
        self._reader, self.file = reader, file
        if reader.size != expected.size or file.size != expected.size or file.header_size != expected.header_size:
            raise CorruptionError(
                f"{file.name} has {reader.size} bytes, but the manifest says {expected.size} (predicted: {file.size})"
            )
        header = bytearray(file.header_size)
        reader.read([memoryview(header)], 0)
        if digest(bytes(header)) != expected.digest:
            raise CorruptionError(f"{file.name}: its header is corrupted: its digest does not match the manifest")
        self._checksums = file.checksums(bytes(header))
        self._starts = file.header_size + file.plan.starts

    def read(
        self,
        destinations: Sequence[Destination],
        threads: int = 2,
        progress: Progress | None = None,
        memory: int | None = None,
    ) -> None:
        """Fill all destinations, which the caller keeps alive; call `progress` with the bytes filled.

        `memory` bounds the windows.
        """
        window, through_windows = window_size(memory, threads)
        straight, windows = self._divide(destinations, window // BLOCK)
        order = np.argsort(straight.offsets, kind="stable")
        blocks = _Blocks(*(column[order] for column in straight))
        in_threads(
            lambda first, last, stop: self._read_straight(_Blocks(*(c[first:last] for c in blocks)), stop, progress),
            split(blocks.nbytes, threads, least=8 * BLOCK),
        )
        sizes = np.array([each_window.blocks * BLOCK for each_window in windows], np.int64)
        in_threads(
            lambda first, last, stop: self._read_windows(windows[first:last], window, stop, progress),
            split(sizes, through_windows, least=8 * BLOCK),
        )

    def read_runs(self, runs: Sequence[Run], slot: Tensor) -> None:
        """Read and verify these runs of blocks into their positions in the slot."""
        counts = np.array([run.blocks for run in runs], np.int64)
        which = np.repeat(np.arange(len(runs)), counts)
        number = np.arange(len(which)) - np.repeat(np.cumsum(counts) - counts, counts)
        chunks, first, at = (np.array([run[field] for run in runs], np.int64)[which] for field in (1, 2, 4))
        blocks = self._blocks(chunks, first + number, slot.data_ptr() + at + number * BLOCK)
        self._read_straight(blocks, Stop(), None)

    def _divide(self, destinations: Sequence[Destination], max_blocks: int) -> tuple[_Blocks, list[_Window]]:
        """Divide the blocks into those read in place and those read through windows."""
        windows: list[_Window] = []
        full_chunks: list[int] = []
        addresses: list[int] = []
        parts: list[_Blocks] = []
        for destination in destinations:
            (_, chunk, region, chunk_region), tensor, frame, _, is_straight = destination
            is_all = region is chunk_region or region == chunk_region
            is_framed = region is frame or region == frame
            memory_view = tensor if is_framed else tensor[region.slices(frame)]
            if is_all and ((is_straight and is_framed) or _is_contiguous_host(destination, memory_view)):
                full_chunks.append(chunk)
                addresses.append(memory_view.data_ptr())
            else:
                straight, through_windows = self._split_part(destination, memory_view, max_blocks)
                parts.append(straight)
                windows += through_windows
        chunks = np.array(full_chunks, np.int64)
        counts = self.file.blocks[chunks]
        which = np.repeat(np.arange(len(chunks)), counts)
        number = np.arange(len(which)) - np.repeat(np.cumsum(counts) - counts, counts)
        parts.append(
            self._blocks(chunks[which], number, np.array(addresses, np.int64)[which] + number * BLOCK)
            if len(chunks)
            else _Blocks(*(np.empty(0, np.int64),) * 4)
        )
        return _Blocks(*(np.concatenate(columns) for columns in zip(*parts, strict=True))), windows

    def _blocks(self, chunks: Integers, indices: Integers, addresses: Integers) -> _Blocks:
        plan, file = self.file.plan, self.file
        within = indices * BLOCK
        return _Blocks(
            file.first_blocks[chunks] + indices,
            self._starts[chunks] + within,
            addresses,
            np.minimum(BLOCK, plan.nbytes[chunks] - within),
        )

    def _split_part(
        self, destination: Destination, memory_view: Tensor, max_blocks: int
    ) -> tuple[_Blocks, list[_Window]]:
        """Return the blocks of one part: those to be read in place, and windows for the others."""
        part = destination.part
        nbytes = int(self.file.plan.nbytes[part.chunk])
        starts, length = part.region.byte_runs(part.chunk_region, destination.stored.itemsize)
        blocks = blocks_of_part(part, destination.stored.itemsize)
        inside = np.zeros(len(blocks), bool)
        if len(starts) == 1 and _is_contiguous_host(destination, memory_view):
            begin, end = int(starts[0]), int(starts[0]) + length
            inside = (blocks * BLOCK >= begin) & (np.minimum((blocks + 1) * BLOCK, nbytes) <= end)
            full_blocks = blocks[inside]
            straight = self._blocks(
                np.full(len(full_blocks), part.chunk), full_blocks, memory_view.data_ptr() + full_blocks * BLOCK - begin
            )
        else:
            straight = _Blocks(*(np.empty(0, np.int64),) * 4)
        return straight, list(_windows(destination, blocks[~inside], max_blocks))

    def _read_straight(self, blocks: _Blocks, stop: Stop, progress: Progress | None) -> None:
        """Read blocks into place and verify them; adjacent ones with one call."""
        indices, offsets, addresses, sizes = (column.tolist() for column in blocks)
        for first, last in _batches(blocks):
            if stop:
                return
            views = list(map(memory_at, addresses[first:last], sizes[first:last]))
            self._read_and_verify(views, indices[first:last], offsets[first])
            if progress is not None:
                progress(sum(sizes[first:last]))

    def _read_and_verify(self, views: Sequence[memoryview], indices: Sequence[int], start: int) -> None:
        """Read adjacent blocks and verify them."""
        self._reader.read(views, start)
        computed = list(map(crc32c.crc32c, views))
        stored = self._checksums[indices].tolist()
        if computed != stored:
            raise self._corruption(
                next(n for n, actual, expected in zip(indices, computed, stored, strict=True) if actual != expected)
            )

    def _read_windows(self, windows: Sequence[_Window], size: int, stop: Stop, progress: Progress | None) -> None:
        scratch = torch.empty(size, dtype=torch.uint8)
        file, plan = self.file, self.file.plan
        for window in windows:
            if stop:
                return
            chunk = window.destination.part.chunk
            begin = window.first * BLOCK
            nbytes = min(window.blocks * BLOCK, int(plan.nbytes[chunk]) - begin)
            address = scratch.data_ptr()
            views = [memory_at(address + at, min(BLOCK, nbytes - at)) for at in range(0, nbytes, BLOCK)]
            number = int(file.first_blocks[chunk]) + window.first
            start = int(self._starts[chunk]) + begin
            self._read_and_verify(views, list(range(number, number + len(views))), start)
            filled = copy_window(window.destination, scratch, begin, nbytes)
            if progress is not None:
                progress(filled)

    def _corruption(self, number: int) -> CorruptionError:
        file = self.file
        chunk = int(np.searchsorted(file.first_blocks, number, side="right")) - 1
        while file.blocks[chunk] == 0:
            chunk -= 1
        tensor = int(file.plan.tensors[chunk])
        block = number - int(file.first_blocks[chunk])
        return CorruptionError(
            f"{file.name} is corrupted: the checksum of block {block} of {file.plan.region(chunk)} of tensor "
            f"{file.plan.table.names[tensor]!r} does not match"
        )


def _batches(blocks: _Blocks) -> Iterator[tuple[int, int]]:
    """Yield adjacent blocks that are read in one call, as (first, last): as few as make up a batch."""
    ends = np.cumsum(blocks.nbytes).tolist()
    breaks = (np.flatnonzero(blocks.offsets[1:] != blocks.offsets[:-1] + blocks.nbytes[:-1]) + 1).tolist()
    first = 0
    for end in [*breaks, len(ends)]:
        while first < end:
            full = (ends[first - 1] if first else 0) + _BATCH
            last = min(bisect_left(ends, full, first, end) + 1, first + _MAX_BUFFERS, end)
            yield first, last
            first = last


def _windows(destination: Destination, blocks: Integers, max_blocks: int) -> Iterator[_Window]:
    """Group adjacent blocks, as many as a window holds."""
    start = 0
    indices = blocks.tolist()
    for stop in range(1, len(indices) + 1):
        if stop == len(indices) or indices[stop] != indices[stop - 1] + 1 or stop - start == max_blocks:
            yield _Window(destination, indices[start], stop - start)
            start = stop


def _is_contiguous_host(destination: Destination, memory_view: Tensor) -> bool:
    """Return True if the memory is contiguous host memory that takes the stored bytes without conversion."""
    return memory_view.is_cpu and memory_view.is_contiguous() and destination.is_plain


def copy_window(destination: Destination, scratch: Tensor, begin: int, nbytes: int) -> int:
    """Copy a part's elements from a window, which begins at byte `begin` of its chunk, converting them if needed.

    Return the number of stored bytes that were copied.
    """
    part, tensor, frame, stored, _ = destination
    if scratch.storage_offset() % stored.itemsize:  # files of ours are aligned, those of others may not be
        scratch = scratch.clone()
    target = bits(tensor) if destination.is_plain else tensor
    data = scratch.view(target.dtype if destination.is_plain else stored)
    if stored == torch.bool and not destination.is_plain and nbytes and int(scratch[:nbytes].max()) > 1:
        raise CorruptionError("bool tensor contains bytes other than 0 and 1")
    position, first, filled = 0, begin // stored.itemsize, 0
    for box in boxes_of_range(part.chunk_region, first, first + nbytes // stored.itemsize):
        common = box.intersect(part.region)
        if common is not None:
            source = data[position : position + box.volume].view(box.size)
            target[common.slices(frame)].copy_(source[common.slices(box)])
            filled += common.volume * stored.itemsize
        position += box.volume
    return filled
