"""Host buffers that a state is copied into before it is written, so that training does not wait for the disk.

Fresh memory is several times slower to fill than memory that was used before, so buffers are kept between saves. They
are anonymous mappings on huge pages if available; for GPU tensors they are pinned, so that copies run at the speed of
the bus.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import threading
from collections.abc import Sequence
from contextlib import suppress
from typing import NamedTuple, final

import numpy as np
import torch
from torch import Tensor

from shardwright.checkpoint.format.data_file import PAGE, DataFile
from shardwright.checkpoint.format.tensor_table import Integers
from shardwright.checkpoint.runtime.parallel import Stop, in_threads, split
from shardwright.checkpoint.writing.data_writer import Blocks, addresses_of, copy_range
from shardwright.comm.packing import bits

__all__ = ["Buffer", "Buffers", "buffers", "release_buffers", "stage", "windows"]

_SMALL = 256 << 10  # GPU tensors up to this many bytes are copied in groups
_GROUP = 32 << 20  # bytes of a group
_MIN_PER_THREAD = 4 << 20  # bytes for which another thread is started
_BYTES_PER_TURN = (
    16 << 20
)  # bytes that a thread copies at a time: many huge pages, so that two threads rarely share one
_PIECE = 512 << 10  # bytes per call: while they fit the core's cache, libc uses the processor's own copy instruction


@final
class Buffer:
    """A host buffer, pinned if it is for GPU tensors."""

    def __init__(self, nbytes: int, *, pinned: bool) -> None:
        self.nbytes = -(-max(nbytes, 1) // PAGE) * PAGE
        memory = mmap.mmap(-1, self.nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        for advice in ("MADV_HUGEPAGE", "MADV_DONTFORK"):  # a forked child that copies it on write would double it
            if hasattr(mmap, advice):
                with suppress(OSError):
                    memory.madvise(getattr(mmap, advice))
        self.tensor = torch.frombuffer(memory, dtype=torch.uint8)
        self.address = self.tensor.data_ptr()
        self.for_gpu = pinned
        self._registered = pinned and _register(self.address, self.nbytes)

    def free(self) -> None:
        """Unpin the buffer; the memory is freed with the object."""
        if self._registered:
            self._registered = False
            torch.cuda.cudart().cudaHostUnregister(self.address)  # type: ignore[no-untyped-call]  # torch's has none


def _register(address: int, nbytes: int) -> bool:
    """Pin host memory. If the driver refuses (ulimit -l), copies are merely slower."""
    return int(torch.cuda.cudart().cudaHostRegister(address, nbytes, 0)) == 0  # type: ignore[no-untyped-call]  # likewise


@final
class Buffers:
    """A pool of buffers that saves borrow and return.

    >>> pool = Buffers()
    >>> one = pool.take(1000, limit=1000)
    >>> pool.give(one)
    >>> pool.take(900, limit=1000) is one
    True
    """

    def __init__(self) -> None:
        self._free: list[Buffer] = []
        self._in_use: dict[int, int] = {}  # the sizes requested of the buffers in use, by id
        self._changed = threading.Condition()
        self.allocations = 0

    def take(self, nbytes: int, limit: int, *, pinned: bool = False) -> Buffer:
        """Borrow a buffer of at least `nbytes`, blocking until the total in use stays within `limit`.

        A single buffer is always available.
        """
        with self._changed:
            while self._in_use and sum(self._in_use.values()) + nbytes > limit:
                self._changed.wait()
            fitting = [buffer for buffer in self._free if buffer.nbytes >= nbytes and buffer.for_gpu >= pinned]
            if fitting:
                buffer = min(fitting, key=lambda each: each.nbytes)
                self._free.remove(buffer)
            else:
                self._free_all()  # before another is allocated, so that buffers that are too small do not add up
                buffer = Buffer(nbytes, pinned=pinned)
                self.allocations += 1
            self._in_use[id(buffer)] = nbytes
            return buffer

    def give(self, buffer: Buffer) -> None:
        """Return a buffer to the pool."""
        with self._changed:
            del self._in_use[id(buffer)]
            self._free.append(buffer)
            self._changed.notify_all()

    def release(self) -> None:
        """Free the buffers that are not in use."""
        with self._changed:
            self._free_all()

    @property
    def kept(self) -> int:
        """Bytes kept for the next save."""
        with self._changed:
            return sum(buffer.nbytes for buffer in self._free)

    def abandon(self) -> None:
        """In a forked child: the buffers belong to the parent."""
        self.__init__()  # with a new lock: this one may be held by a thread of the parent

    def _free_all(self) -> None:
        for buffer in self._free:
            buffer.free()
        self._free.clear()


buffers = Buffers()
os.register_at_fork(after_in_child=buffers.abandon)


def release_buffers() -> None:
    """Free the host memory that `async_save` keeps between saves; the next save allocates it again.

    >>> release_buffers()
    """
    buffers.release()


def windows(file: DataFile, nbytes: int) -> list[tuple[int, int]]:
    """Divide the blocks of a file into runs of at most `nbytes`, as (first, last); only the first run may be short.

    Staging waits until all runs but the last are written, so the last should be the longest.

    >>> from shardwright.checkpoint.format.write_layout import file_plan
    >>> from shardwright.checkpoint.format.tensor_table import TensorTable
    >>> from shardwright.layout import Layout, Mesh, Replicate
    >>> bytes_ = Layout(Mesh((1,)), [Replicate()], (5 << 20,))
    >>> windows(DataFile(file_plan(TensorTable.of(["w"], ["int8"], [1], [bytes_]), 0), ""), 2 << 20)
    [(0, 1), (1, 3), (3, 5)]
    """
    ends = np.cumsum(Blocks.of(file, np.zeros(len(file.plan.tensors), np.int64)).nbytes)
    runs: list[tuple[int, int]] = []
    last = len(ends)
    while last:
        # The first block such that it and those after it fit; a single one always does.
        before = np.concatenate([[0], ends[: last - 1]])
        first = min(int(np.searchsorted(before, int(ends[last - 1]) - nbytes)), last - 1)
        runs.append((first, last))
        last = first
    return runs[::-1]


def stage(file: DataFile, chunks: Sequence[Tensor], first: int, last: int, buffer: Buffer, threads: int = 2) -> Blocks:
    """Copy blocks `first` to `last` (exclusive) of a file into a buffer; return where they are in it.

    After it returns, changes to the chunks do not affect the copy.
    """
    staged = Blocks.of(file, file.plan.starts).part(first, last)  # "addresses" are offsets in the data
    staged = staged._replace(addresses=staged.addresses - staged.addresses[:1] + buffer.address)
    addresses = addresses_of(chunks)
    straight = Blocks.of(file, addresses)
    inside = (straight.numbers >= first) & (straight.numbers < last)
    straight = Blocks(*(column[inside] for column in straight))
    targets = staged.addresses[straight.numbers - first]
    _copy_not_contiguous(file, chunks, np.flatnonzero(addresses < 0), staged, first, last, buffer)
    turns = max(threads, int(straight.nbytes.sum()) // _BYTES_PER_TURN)
    in_threads(
        lambda low, high, stop: _copy_straight(
            straight.addresses[low:high], targets[low:high], straight.nbytes[low:high], stop
        ),
        split(straight.nbytes, turns, least=_MIN_PER_THREAD),
        threads,
    )
    _synchronize(chunks)
    return staged


def _copy_straight(sources: Integers, targets: Integers, nbytes: Integers, stop: Stop) -> None:
    """Copy blocks in pieces, without the GIL."""
    for target, source, size in zip(targets.tolist(), sources.tolist(), nbytes.tolist(), strict=True):
        if stop:
            return
        for at in range(0, size, _PIECE):
            ctypes.memmove(target + at, source + at, min(_PIECE, size - at))


def _copy_not_contiguous(
    file: DataFile,
    chunks: Sequence[Tensor],
    not_contiguous: Integers,
    staged: Blocks,
    first: int,
    last: int,
    buffer: Buffer,
) -> None:
    """Copy strided and device tensors; those on a device on a stream of their own, so that copies are queued."""
    by_device: dict[torch.device, list[_Copy]] = {}
    for chunk in not_contiguous.tolist():
        begin = max(int(file.first_blocks[chunk]), first) - first
        end = min(int(file.first_blocks[chunk] + file.blocks[chunk]), last) - first
        if begin < end:
            at = int(staged.addresses[begin]) - buffer.address
            nbytes = int(staged.nbytes[begin:end].sum())
            within = int(staged.offsets[begin]) - file.header_size - int(file.plan.starts[chunk])
            by_device.setdefault(chunks[chunk].device, []).append(_Copy(chunks[chunk], at, within, nbytes))
    for device, copies in by_device.items():
        if device.type != "cuda":
            for tensor, at, within, nbytes in copies:
                copy_range(buffer.tensor[at : at + nbytes], tensor, within, nbytes)
            continue
        with torch.cuda.stream(_stream(device)):
            for group in _grouped(copies):
                _copy_from_gpu(group, buffer)


class _Copy(NamedTuple):
    """A copy of `nbytes` bytes of a chunk, from offset `within`, to offset `at` of the buffer."""

    tensor: Tensor
    at: int
    within: int
    nbytes: int

    @property
    def is_small(self) -> bool:
        return self.nbytes <= _SMALL and self.nbytes == self.tensor.numel() * self.tensor.itemsize


def _grouped(copies: Sequence[_Copy]) -> list[list[_Copy]]:
    """Group small chunks that are adjacent in the buffer; every other copy is a group of its own."""
    groups: list[list[_Copy]] = []
    size = 0
    for copy in copies:
        before = groups[-1][-1] if groups else None
        if (
            before is not None
            and before.is_small
            and copy.is_small
            and before.at + before.nbytes == copy.at
            and before.tensor.itemsize == copy.tensor.itemsize
            and size + copy.nbytes <= _GROUP
        ):
            groups[-1].append(copy)
            size += copy.nbytes
        else:
            groups.append([copy])
            size = copy.nbytes
    return groups


def _copy_from_gpu(group: Sequence[_Copy], buffer: Buffer) -> None:
    """Enqueue a copy to the host: of many small tensors at once, concatenated on the device."""
    at, nbytes = group[0].at, sum(copy.nbytes for copy in group)
    tensor, within = group[0].tensor, group[0].within
    if len(group) > 1:
        tensor = torch.cat([bits(copy.tensor.detach().resolve_conj().resolve_neg()).reshape(-1) for copy in group])
        within = 0
    copy_range(buffer.tensor[at : at + nbytes], tensor, within, nbytes, wait=False)


def _stream(device: torch.device) -> torch.cuda.Stream:
    """Return the stream for copies from a device, ordered after the caller's current stream."""
    stream = _streams.get(device)
    if stream is None:
        stream = _streams[device] = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]  # likewise
    stream.wait_stream(torch.cuda.current_stream(device))
    return stream


_streams: dict[torch.device, torch.cuda.Stream] = {}


def _synchronize(chunks: Sequence[Tensor]) -> None:
    for device in {chunk.device for chunk in chunks if chunk.device.type == "cuda"}:
        if device in _streams:
            event = torch.cuda.Event()  # type: ignore[no-untyped-call]  # likewise
            event.record(_streams[device])
            event.synchronize()
