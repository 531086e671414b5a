"""Host memory that a state is copied into before it is written, so that nobody waits for the disk.

Fresh memory is several times slower to fill than memory that was used before, so buffers are kept between saves. They
are anonymous maps on huge pages where the system gives them; for tensors of a GPU they are registered with its driver,
which then copies at the speed of the bus.
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

_SMALL = 256 << 10  # bytes of a tensor on a GPU that is copied together with others
_GROUP = 32 << 20  # bytes of those together
_LEAST = 4 << 20  # bytes for which another thread is worth starting
_TURN = 16 << 20  # bytes that a thread copies until it takes more: many huge pages, so that two rarely share one
_PIECE = 512 << 10  # bytes of one call: as long as they fit the core's cache, libc uses the processor's own copy


@final
class Buffer:
    """Some host memory, and whether a GPU's driver knows it."""

    def __init__(self, nbytes: int, *, pinned: bool) -> None:
        self.nbytes = -(-max(nbytes, 1) // PAGE) * PAGE
        memory = mmap.mmap(-1, self.nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        for advice in ("MADV_HUGEPAGE", "MADV_DONTFORK"):  # a child that copies it on write would double it
            if hasattr(mmap, advice):
                with suppress(OSError):
                    memory.madvise(getattr(mmap, advice))
        self.tensor = torch.frombuffer(memory, dtype=torch.uint8)
        self.address = self.tensor.data_ptr()
        self.for_gpu = pinned
        self._registered = pinned and _register(self.address, self.nbytes)

    def free(self) -> None:
        """Takes it from the driver; the memory goes with the object."""
        if self._registered:
            self._registered = False
            torch.cuda.cudart().cudaHostUnregister(self.address)  # type: ignore[no-untyped-call]  # torch's has none


def _register(address: int, nbytes: int) -> bool:
    """Makes memory known to the driver. Where it refuses (a limit on locked memory), copies are slower, no more."""
    return int(torch.cuda.cudart().cudaHostRegister(address, nbytes, 0)) == 0  # type: ignore[no-untyped-call]  # likewise


@final
class Buffers:
    """Buffers that saves take and give back.

    >>> pool = Buffers()
    >>> one = pool.take(1000, limit=1000)
    >>> pool.give(one)
    >>> pool.take(900, limit=1000) is one
    True
    """

    def __init__(self) -> None:
        self._free: list[Buffer] = []
        self._taken: dict[int, int] = {}  # what each buffer that is in use was asked for
        self._changed = threading.Condition()
        self.made = 0

    def take(self, nbytes: int, limit: int, *, pinned: bool = False) -> Buffer:
        """A buffer of at least so many bytes, once all that are in use have no more than `limit` with it.

        One alone may always be had.
        """
        with self._changed:
            while self._taken and sum(self._taken.values()) + nbytes > limit:
                self._changed.wait()
            fitting = [buffer for buffer in self._free if buffer.nbytes >= nbytes and buffer.for_gpu >= pinned]
            if fitting:
                buffer = min(fitting, key=lambda each: each.nbytes)
                self._free.remove(buffer)
            else:
                self._drop()  # before another is made: what was too small does not come on top
                buffer = Buffer(nbytes, pinned=pinned)
                self.made += 1
            self._taken[id(buffer)] = nbytes
            return buffer

    def give(self, buffer: Buffer) -> None:
        """Gives a buffer back."""
        with self._changed:
            del self._taken[id(buffer)]
            self._free.append(buffer)
            self._changed.notify_all()

    def release(self) -> None:
        """Frees what is not in use."""
        with self._changed:
            self._drop()

    @property
    def kept(self) -> int:
        """Bytes that are kept for the next save."""
        with self._changed:
            return sum(buffer.nbytes for buffer in self._free)

    def abandon(self) -> None:
        """In a child of a fork: the buffers stayed with the parent."""
        self.__init__()  # with another lock: this one may be held by a thread that is not here

    def _drop(self) -> None:
        for buffer in self._free:
            buffer.free()
        self._free.clear()


buffers = Buffers()
os.register_at_fork(after_in_child=buffers.abandon)


def release_buffers() -> None:
    """Frees the host memory that `async_save` keeps between saves; the next one takes it anew.

    >>> release_buffers()
    """
    buffers.release()


def windows(file: DataFile, nbytes: int) -> list[tuple[int, int]]:
    """The blocks of a file in runs of at most so many bytes, as (first, last); only the first run may be short.

    Whoever stages them waits until all runs but the last are written, so the last is to be the longest.

    >>> from shardwright.checkpoint.format.write_layout import file_plan
    >>> from shardwright.checkpoint.format.tensor_table import TensorTable
    >>> from shardwright.layout import Layout, Mesh, Replicate
    >>> bytes_ = Layout(Mesh((1,)), [Replicate()], (5 << 20,))
    >>> windows(DataFile(file_plan(TensorTable.of(["w"], ["int8"], [1], [bytes_]), 0), ""), 2 << 20)
    [(0, 1), (1, 3), (3, 5)]
    """
    ends = np.cumsum(Blocks.of(file, np.zeros(len(file.plan.tensors), np.int64)).nbytes)
    found: list[tuple[int, int]] = []
    last = len(ends)
    while last:
        # The first block such that it and those behind it fit; a single one always does.
        before = np.concatenate([[0], ends[: last - 1]])
        first = min(int(np.searchsorted(before, int(ends[last - 1]) - nbytes)), last - 1)
        found.append((first, last))
        last = first
    return found[::-1]


def stage(file: DataFile, chunks: Sequence[Tensor], first: int, last: int, buffer: Buffer, threads: int = 2) -> Blocks:
    """Copies blocks `first` to `last` (exclusive) of a file into a buffer, and says where they lie then.

    When it returns, nothing that is done to the chunks changes the copy.
    """
    places = Blocks.of(file, file.plan.starts).part(first, last)  # "addresses" are positions in the data
    places = places._replace(addresses=places.addresses - places.addresses[:1] + buffer.address)
    addresses = addresses_of(chunks)
    straight = Blocks.of(file, addresses)
    inside = (straight.numbers >= first) & (straight.numbers < last)
    straight = Blocks(*(column[inside] for column in straight))
    targets = places.addresses[straight.numbers - first]
    _copy_aside(file, chunks, np.flatnonzero(addresses < 0), places, first, last, buffer)
    turns = max(threads, int(straight.nbytes.sum()) // _TURN)
    in_threads(
        lambda low, high, stop: _copy_straight(
            straight.addresses[low:high], targets[low:high], straight.nbytes[low:high], stop
        ),
        split(straight.nbytes, turns, least=_LEAST),
        threads,
    )
    _await_devices(chunks)
    return places


def _copy_straight(sources: Integers, targets: Integers, nbytes: Integers, stop: Stop) -> None:
    """Copies blocks in pieces, without the GIL."""
    for target, source, size in zip(targets.tolist(), sources.tolist(), nbytes.tolist(), strict=True):
        if stop:
            return
        for at in range(0, size, _PIECE):
            ctypes.memmove(target + at, source + at, min(_PIECE, size - at))


def _copy_aside(
    file: DataFile, chunks: Sequence[Tensor], some: Integers, places: Blocks, first: int, last: int, buffer: Buffer
) -> None:
    """Copies what is strided, or lies on a device: there on a stream of its own, so that copies follow each other."""
    by_device: dict[torch.device, list[_Copy]] = {}
    for chunk in some.tolist():
        begin = max(int(file.first_blocks[chunk]), first) - first
        end = min(int(file.first_blocks[chunk] + file.blocks[chunk]), last) - first
        if begin < end:
            at = int(places.addresses[begin]) - buffer.address
            nbytes = int(places.nbytes[begin:end].sum())
            within = int(places.offsets[begin]) - file.header_size - int(file.plan.starts[chunk])
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
    """Bytes of a chunk, from `within` on, and where in the buffer they go."""

    tensor: Tensor
    at: int
    within: int
    nbytes: int

    @property
    def is_small(self) -> bool:
        return self.nbytes <= _SMALL and self.nbytes == self.tensor.numel() * self.tensor.itemsize


def _grouped(copies: Sequence[_Copy]) -> list[list[_Copy]]:
    """Small chunks that follow each other in the buffer, in groups; every other stretch by itself."""
    groups: list[list[_Copy]] = []
    size = 0
    for one in copies:
        before = groups[-1][-1] if groups else None
        if (
            before is not None
            and before.is_small
            and one.is_small
            and before.at + before.nbytes == one.at
            and before.tensor.itemsize == one.tensor.itemsize
            and size + one.nbytes <= _GROUP
        ):
            groups[-1].append(one)
            size += one.nbytes
        else:
            groups.append([one])
            size = one.nbytes
    return groups


def _copy_from_gpu(group: Sequence[_Copy], buffer: Buffer) -> None:
    """Begins a copy over the bus: of many small tensors at once, put together there, since each costs as much."""
    at, nbytes = group[0].at, sum(one.nbytes for one in group)
    tensor, within = group[0].tensor, group[0].within
    if len(group) > 1:
        tensor = torch.cat([bits(each.tensor.detach().resolve_conj().resolve_neg()).reshape(-1) for each in group])
        within = 0
    copy_range(buffer.tensor[at : at + nbytes], tensor, within, nbytes, wait=False)


def _stream(device: torch.device) -> torch.cuda.Stream:
    """The stream of copies from a device, behind all that its caller has asked the device for."""
    stream = _streams.get(device)
    if stream is None:
        stream = _streams[device] = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]  # likewise
    stream.wait_stream(torch.cuda.current_stream(device))
    return stream


_streams: dict[torch.device, torch.cuda.Stream] = {}


def _await_devices(chunks: Sequence[Tensor]) -> None:
    for device in {chunk.device for chunk in chunks if chunk.device.type == "cuda"}:
        if device in _streams:
            event = torch.cuda.Event()  # type: ignore[no-untyped-call]  # likewise
            event.record(_streams[device])
            event.synchronize()
