"""Reading data files: straight to where the values belong, every block verified while it is in the cache.

A block that is wanted whole, and whose place in memory is one stretch, is read there. The others (the edges of a
slice, columns of a matrix) are read into a window, verified, and copied from it. No byte is used that was not verified.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator, Sequence
from typing import NamedTuple, TypeAlias

import crc32c
import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from shardwright.checkpoint.format.data_file import BLOCK, DataFile, FileEntry, digest
from shardwright.checkpoint.format.locate import Part
from shardwright.checkpoint.format.split import boxes_of_range
from shardwright.checkpoint.format.tensor_table import Integers
from shardwright.checkpoint.reading.host_sharing import Run, touched
from shardwright.checkpoint.runtime.address_space import memory_at
from shardwright.checkpoint.runtime.parallel import Stop, in_threads, split
from shardwright.checkpoint.runtime.progress import Progress
from shardwright.checkpoint.runtime.windows import window_size
from shardwright.comm.packing import bits
from shardwright.errors import CorruptionError
from shardwright.layout import Region
from shardwright.storage import Reader

__all__ = ["Destination", "FileReader", "copy_window"]

Checksums: TypeAlias = npt.NDArray[np.uint32]

_BATCH = 1 << 20  # bytes read in one call and verified at once: they are still in the cache
_MAX_BUFFERS = 1000  # buffers in one call


class Destination(NamedTuple):
    """Where a part of a chunk goes: into `tensor`, which holds `frame` of the global tensor.

    `stored` is the dtype that the file has it in. `is_straight` if the tensor's bytes are known to lie in host memory
    one after the other, as they are stored.
    """

    part: Part
    tensor: Tensor
    frame: Region
    stored: torch.dtype
    is_straight: bool = False

    @property
    def is_plain(self) -> bool:
        """Whether the stored bytes are those of the tensor, so that they can be copied as they are."""
        tensor = self.tensor
        return tensor.dtype is self.stored and not tensor.is_conj() and not tensor.is_neg()


class _Blocks(NamedTuple):
    """Blocks to be read straight into memory, by where they lie in the file."""

    numbers: Integers
    offsets: Integers
    addresses: Integers
    nbytes: Integers


class _Window(NamedTuple):
    """Neighbouring blocks of a chunk that are read aside, and what is copied from them."""

    destination: Destination
    first: int  # the number of its first block within the chunk
    blocks: int


class FileReader:
    """A data file, open, its header verified."""

    def __init__(self, reader: Reader, file: DataFile, expected: FileEntry) -> None:
        self._reader, self.file = reader, file
        if reader.size != expected.size or file.size != expected.size or file.header_size != expected.header_size:
            raise CorruptionError(
                f"{file.name} has {reader.size} bytes, and the manifest says {expected.size} (predicted: {file.size})"
            )
        header = bytearray(file.header_size)
        reader.read([memoryview(header)], 0)
        if digest(bytes(header)) != expected.digest:
            raise CorruptionError(f"{file.name}: its header is damaged: its digest is not the one in the manifest")
        self._checksums = file.checksums(bytes(header))

    def read(
        self,
        destinations: Sequence[Destination],
        threads: int = 2,
        progress: Progress | None = None,
        memory: int | None = None,
    ) -> None:
        """Fills all destinations; the caller keeps them alive. `progress` is told the bytes that were filled.

        `memory` bounds what is read aside.
        """
        window, aside = window_size(memory, threads)
        straight, windows = self._sort(destinations, window // BLOCK)
        order = np.argsort(straight.offsets, kind="stable")
        blocks = _Blocks(*(column[order] for column in straight))
        in_threads(
            lambda first, last, stop: self._read_straight(_Blocks(*(c[first:last] for c in blocks)), stop, progress),
            split(blocks.nbytes, threads, least=8 * BLOCK),
        )
        sizes = np.array([one.blocks * BLOCK for one in windows], np.int64)
        in_threads(
            lambda first, last, stop: self._read_windows(windows[first:last], window, stop, progress),
            split(sizes, aside, least=8 * BLOCK),
        )

    def read_runs(self, runs: Sequence[Run], slot: Tensor) -> None:
        """Reads and verifies these runs of blocks, each into its place in the slot."""
        counts = np.array([run.blocks for run in runs], np.int64)
        which = np.repeat(np.arange(len(runs)), counts)
        number = np.arange(len(which)) - np.repeat(np.cumsum(counts) - counts, counts)
        chunks, first, at = (np.array([run[field] for run in runs], np.int64)[which] for field in (1, 2, 4))
        blocks = self._blocks(chunks, first + number, slot.data_ptr() + at + number * BLOCK)
        self._read_straight(blocks, Stop(), None)

    def _sort(self, destinations: Sequence[Destination], most: int) -> tuple[_Blocks, list[_Window]]:
        """Which blocks are read straight, and which through windows."""
        windows: list[_Window] = []
        whole: list[int] = []
        addresses: list[int] = []
        parts: list[_Blocks] = []
        for destination in destinations:
            (_, chunk, region, chunk_region), tensor, frame, _, is_straight = destination
            is_all = region is chunk_region or region == chunk_region
            is_framed = region is frame or region == frame
            place = tensor if is_framed else tensor[region.slices(frame)]
            if is_all and ((is_straight and is_framed) or _is_contiguous_host(destination, place)):
                whole.append(chunk)
                addresses.append(place.data_ptr())
            else:
                straight, aside = self._cut(destination, place, most)
                parts.append(straight)
                windows += aside
        chunks = np.array(whole, np.int64)
        counts = self.file.blocks[chunks]
        which = np.repeat(np.arange(len(chunks)), counts)
        number = np.arange(len(which)) - np.repeat(np.cumsum(counts) - counts, counts)
        parts.append(
            self._blocks(chunks[which], number, np.array(addresses, np.int64)[which] + number * BLOCK)
            if len(chunks)
            else _Blocks(*(np.empty(0, np.int64),) * 4)
        )
        return _Blocks(*(np.concatenate(columns) for columns in zip(*parts, strict=True))), windows

    def _blocks(self, chunks: Integers, numbers: Integers, addresses: Integers) -> _Blocks:
        plan, file = self.file.plan, self.file
        within = numbers * BLOCK
        return _Blocks(
            file.first_blocks[chunks] + numbers,
            file.header_size + plan.starts[chunks] + within,
            addresses,
            np.minimum(BLOCK, plan.nbytes[chunks] - within),
        )

    def _cut(self, destination: Destination, place: Tensor, most: int) -> tuple[_Blocks, list[_Window]]:
        """The blocks of one part: those wanted whole in one stretch of memory straight, the others aside."""
        part = destination.part
        nbytes = int(self.file.plan.nbytes[part.chunk])
        starts, length = part.region.byte_runs(part.chunk_region, destination.stored.itemsize)
        blocks = touched(part, destination.stored.itemsize)
        inside = np.zeros(len(blocks), bool)
        if len(starts) == 1 and _is_contiguous_host(destination, place):
            begin, end = int(starts[0]), int(starts[0]) + length
            inside = (blocks * BLOCK >= begin) & (np.minimum((blocks + 1) * BLOCK, nbytes) <= end)
            whole = blocks[inside]
            straight = self._blocks(np.full(len(whole), part.chunk), whole, place.data_ptr() + whole * BLOCK - begin)
        else:
            straight = _Blocks(*(np.empty(0, np.int64),) * 4)
        return straight, list(_windows(destination, blocks[~inside], most))

    def _read_straight(self, blocks: _Blocks, stop: Stop, progress: Progress | None) -> None:
        """Reads blocks to where they belong and verifies them; neighbours in the file with one call."""
        numbers, offsets, addresses, sizes = (column.tolist() for column in blocks)
        stored = self._checksums[blocks.numbers].tolist()
        for first, last in _batches(blocks):
            if stop:
                return
            views = list(map(memory_at, addresses[first:last], sizes[first:last]))
            self._take(views, numbers[first:last], stored[first:last], offsets[first])
            if progress is not None:
                progress(sum(sizes[first:last]))

    def _take(self, views: Sequence[memoryview], numbers: Sequence[int], stored: Sequence[int], start: int) -> None:
        """Reads neighbouring blocks and verifies them."""
        self._reader.read(views, start)
        found = list(map(crc32c.crc32c, views))
        if found != stored:
            raise self._damaged(next(n for n, one, other in zip(numbers, found, stored, strict=True) if one != other))

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
            start = file.header_size + int(plan.starts[chunk]) + begin
            numbers = range(number, number + len(views))
            self._take(views, numbers, self._checksums[number : numbers.stop].tolist(), start)
            filled = copy_window(window.destination, scratch, begin, nbytes)
            if progress is not None:
                progress(filled)

    def _damaged(self, number: int) -> CorruptionError:
        file = self.file
        chunk = int(np.searchsorted(file.first_blocks, number, side="right")) - 1
        while file.blocks[chunk] == 0:
            chunk -= 1
        tensor = int(file.plan.tensors[chunk])
        block = number - int(file.first_blocks[chunk])
        return CorruptionError(
            f"{file.name} is damaged: block {block} of {file.plan.region(chunk)} of tensor "
            f"{file.plan.table.names[tensor]!r} does not have its checksum"
        )


def _batches(blocks: _Blocks) -> Iterator[tuple[int, int]]:
    """Neighbouring blocks that are read in one call, as (first, last): as few as make up a batch."""
    ends = np.cumsum(blocks.nbytes).tolist()
    breaks = (np.flatnonzero(blocks.offsets[1:] != blocks.offsets[:-1] + blocks.nbytes[:-1]) + 1).tolist()
    first = 0
    for end in [*breaks, len(ends)]:
        while first < end:
            full = (ends[first - 1] if first else 0) + _BATCH
            last = min(bisect_left(ends, full, first, end) + 1, first + _MAX_BUFFERS, end)
            yield first, last
            first = last


def _windows(destination: Destination, blocks: Integers, most: int) -> Iterator[_Window]:
    """Neighbouring blocks together, as many as a window holds."""
    start = 0
    numbers = blocks.tolist()
    for place in range(1, len(numbers) + 1):
        if place == len(numbers) or numbers[place] != numbers[place - 1] + 1 or place - start == most:
            yield _Window(destination, numbers[start], place - start)
            start = place


def _is_contiguous_host(destination: Destination, place: Tensor) -> bool:
    """Whether a place is one stretch of host memory that takes the stored bytes as they are."""
    return place.is_cpu and place.is_contiguous() and destination.is_plain


def copy_window(destination: Destination, scratch: Tensor, begin: int, nbytes: int) -> int:
    """Copies what a window onto a chunk, from byte `begin` on, holds of a part into its place, converted if need be.

    Gives the stored bytes that were copied.
    """
    part, tensor, frame, stored, _ = destination
    target = bits(tensor) if destination.is_plain else tensor
    data = scratch.view(target.dtype if destination.is_plain else stored)
    if stored == torch.bool and not destination.is_plain and nbytes and int(scratch[:nbytes].max()) > 1:
        raise CorruptionError("a tensor of truths holds bytes that are neither 0 nor 1")
    position, first, filled = 0, begin // stored.itemsize, 0
    for box in boxes_of_range(part.chunk_region, first, first + nbytes // stored.itemsize):
        common = box.intersect(part.region)
        if common is not None:
            source = data[position : position + box.volume].view(box.size)
            target[common.slices(frame)].copy_(source[common.slices(box)])
            filled += common.volume * stored.itemsize
        position += box.volume
    return filled
