"""Read tensors from files that another program wrote: byte ranges without checksums of their own.

What is wanted is read exactly, but for gaps shorter than a page. If a range is part of a record with a CRC-32, the
record is checked as soon as all of it was read. Tensors whose elements are not in row-major order are read whole.
"""

from __future__ import annotations

import threading
import zlib
from collections.abc import Iterator, Sequence
from typing import final

import numpy as np
import torch
from torch import Tensor

from shardwright.checkpoint.format.data_file import BLOCK, PAGE
from shardwright.checkpoint.format.locate import Part
from shardwright.checkpoint.format.split import boxes_of_range
from shardwright.checkpoint.reading.data_reader import Destination, FileReader, copy_window
from shardwright.checkpoint.reading.host_sharing import Run
from shardwright.checkpoint.reading.record_checks import Piece, RecordChecks
from shardwright.checkpoint.runtime.address_space import memory_at
from shardwright.checkpoint.runtime.parallel import Stop, in_threads, split
from shardwright.checkpoint.runtime.progress import Progress
from shardwright.checkpoint.runtime.windows import window_size
from shardwright.errors import CorruptionError
from shardwright.interop.formats import ForeignFile, Location
from shardwright.layout import Region
from shardwright.storage import Reader

__all__ = ["ForeignFileReader"]


@final
class ForeignFileReader(FileReader):
    """An open file of another format."""

    file: ForeignFile

    def __init__(self, reader: Reader, file: ForeignFile) -> None:
        self._reader, self.file = reader, file
        if reader.size < file.least_size:
            raise CorruptionError(
                f"{file.name} has {reader.size} bytes, but its tensors need {file.least_size}: it is truncated"
            )
        self._starts = np.full(len(file.plan.tensors), -1, np.int64)
        self._locations: dict[int, Location] = {}
        self._lock = threading.Lock()
        self.checks = RecordChecks(file.name)

    def read(
        self,
        destinations: Sequence[Destination],
        threads: int = 2,
        progress: Progress | None = None,
        memory: int | None = None,
    ) -> None:
        """Fill all destinations, which the caller keeps alive; call `progress` with the bytes filled."""
        whole: list[Destination] = []
        partial: list[Destination] = []
        for destination in destinations:
            if self._locate(destination.part.chunk).strides is not None:
                self._read_strided(destination, progress)
            elif destination.part.region == destination.part.chunk_region:
                whole.append(destination)
            else:
                partial.append(destination)
        super().read(whole, threads, progress, memory)
        window, through_windows = window_size(memory, threads)
        sizes = np.array([each.part.region.volume * each.stored.itemsize for each in partial], np.int64)
        in_threads(
            lambda first, last, stop: self._read_partial(partial[first:last], window, stop, progress),
            split(sizes, through_windows, least=8 * BLOCK),
        )

    def read_runs(self, runs: Sequence[Run], slot: Tensor) -> None:
        """Read these runs of blocks into their positions in the slot; strided chunks as if they were row-major."""
        plain = [run for run in runs if self._locate(run.chunk).strides is None]
        super().read_runs(plain, slot)
        for run in runs:
            if self._locate(run.chunk).strides is not None:
                self._read_strided_run(run, slot)

    def stored_ranges(self, part: Part, itemsize: int) -> list[tuple[int, int]]:
        """Return the byte ranges of the file that hold a part of a tensor."""
        location = self._locate(part.chunk)
        if location.strides is not None:
            return [(location.start, location.start + location.span)]
        return [(location.start + begin, location.start + end) for begin, end in _ranges(part, itemsize, 1 << 62)]

    def _locate(self, chunk: int) -> Location:
        location = self._locations.get(chunk)
        if location is None:
            location = self.file.locate(chunk, self._reader)
            if location.start < 0 or location.start + location.span > self._reader.size:
                raise CorruptionError(
                    f"{self.file.name} has {self._reader.size} bytes, but tensor {self._name(chunk)!r} ends at "
                    f"{location.start + location.span}: it is truncated"
                )
            self._locations[chunk] = location
            self._starts[chunk] = location.start
        return location

    def _name(self, chunk: int) -> str:
        plan = self.file.plan
        return plan.table.names[int(plan.tensors[chunk])]

    def _read_and_verify(self, views: Sequence[memoryview], indices: Sequence[int], start: int) -> None:
        self._reader.read(views, start)
        chunks = np.searchsorted(self.file.first_blocks, indices, side="right") - 1
        for view, chunk in zip(views, chunks.tolist(), strict=True):
            while not self.file.blocks[chunk]:  # chunks without elements begin at the same block
                chunk -= 1
            self._check(chunk, start, view)
            start += view.nbytes

    def _check(self, chunk: int, start: int, view: memoryview) -> None:
        """Count a range that was read towards its record."""
        record = self._locations[chunk].record
        if record is not None and view.nbytes:
            try:
                self.checks.add(Piece(record, start, start + view.nbytes, zlib.crc32(view)))
            except CorruptionError as error:
                region = self.file.plan.region(chunk)
                raise CorruptionError(f"{error}: it holds {region} of tensor {self._name(chunk)!r}") from None

    def _read_partial(
        self, destinations: Sequence[Destination], window: int, stop: Stop, progress: Progress | None
    ) -> None:
        """Fill destinations that need a part of their chunk."""
        scratch = torch.empty(window, dtype=torch.uint8)
        for destination in destinations:
            part = destination.part
            start = int(self._starts[part.chunk])
            for begin, end in _ranges(part, destination.stored.itemsize, window):
                if stop:
                    return
                view = memory_at(scratch.data_ptr(), end - begin)
                self._reader.read([view], start + begin)
                self._check(part.chunk, start + begin, view)
                filled = copy_window(destination, scratch, begin, end - begin)
                if progress is not None:
                    progress(filled)

    def _read_strided(self, destination: Destination, progress: Progress | None) -> None:
        part, tensor, frame, stored, _ = destination
        elements = self._strided(part.chunk, stored)
        source = elements[part.region.slices(part.chunk_region)]
        tensor[part.region.slices(frame)].copy_(source)
        if progress is not None:
            progress(part.region.volume * stored.itemsize)

    def _read_strided_run(self, run: Run, slot: Tensor) -> None:
        plan = self.file.plan
        itemsize = int(plan.table.itemsizes[int(plan.tensors[run.chunk])])
        bytes_of = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64, 16: torch.complex128}
        elements = self._strided(run.chunk, bytes_of[itemsize])
        nbytes = min(run.blocks * BLOCK, int(plan.nbytes[run.chunk]) - run.first * BLOCK)
        first, last = run.first * BLOCK // itemsize, (run.first * BLOCK + nbytes) // itemsize
        frame, at = Region.whole(elements.shape), run.at
        for box in boxes_of_range(frame, first, last):
            piece = elements[box.slices(frame)].contiguous().view(-1).view(torch.uint8)
            slot[at : at + len(piece)].copy_(piece)
            at += len(piece)

    def _strided(self, chunk: int, dtype: torch.dtype) -> Tensor:
        """Read all of a chunk whose elements are not in row-major order, and return it as a view with its strides."""
        location = self._locate(chunk)
        assert location.strides is not None  # else it is read in place
        with self._lock:
            data = torch.empty(location.span, dtype=torch.uint8)
            for begin in range(0, location.span, BLOCK):
                view = memory_at(data.data_ptr() + begin, min(BLOCK, location.span - begin))
                self._reader.read([view], location.start + begin)
                self._check(chunk, location.start + begin, view)
        return data.view(dtype).as_strided(self.file.plan.region(chunk).size, location.strides)


def _ranges(part: Part, itemsize: int, window: int) -> Iterator[tuple[int, int]]:
    """Yield the byte ranges of a chunk that hold a part of it, none longer than a window."""
    starts, length = part.region.byte_runs(part.chunk_region, itemsize)
    begins, ends = starts, starts + length
    if len(begins) > 1:  # join runs with short gaps
        is_apart = begins[1:] - ends[:-1] > PAGE
        begins, ends = begins[np.append(True, is_apart)], ends[np.append(is_apart, True)]
    for begin, end in zip(begins.tolist(), ends.tolist(), strict=True):
        for first in range(begin, end, window):
            yield first, min(end, first + window)
