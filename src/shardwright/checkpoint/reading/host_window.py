"""Shared memory of the ranks of a host: one rank reads a segment into it, all copy what they need.

Each rank has two slots, so that it reads the next segment while the others copy from the last. Ranks publish their
progress as counters in the window's file, through system calls, which are ordered with the data. The file is unlinked
once all ranks have opened it, so nothing is left behind, however a rank ends. While a rank waits, it checks the
processes of the others, so that a killed one is noticed at once.
"""

from __future__ import annotations

import mmap
import os
import socket
import struct
import time
from collections.abc import Callable, Sequence
from typing import NamedTuple, final

import msgspec
import torch
from torch import Tensor

from shardwright import comm
from shardwright.errors import RankLostError

__all__ = ["SLOT", "HostWindow", "Process", "open_window", "this_host"]

SLOT = 4 << 20
_FOLDER = "/dev/shm"
_NUMBER = struct.Struct("<q")
_PAGE = 4096
_FAILED = 1 << 62
_CHECK_INTERVAL = 0.2  # seconds between checks of the processes waited for


class Process(NamedTuple):
    """A process of this host: its pid, the pid's namespace, and its start time, as pids are reused."""

    pid: int
    started: str
    namespace: str

    @classmethod
    def own(cls) -> Process | None:
        """Return this process; None if /proc is not available."""
        try:
            pid = os.getpid()
            return cls(pid, _state_of(pid)[1], os.readlink("/proc/self/ns/pid"))
        except (OSError, IndexError):
            return None

    def is_gone(self) -> bool:
        """Return True if it has ended: its pid is free, is reused, or belongs to a zombie."""
        try:
            state, started = _state_of(self.pid)
        except (FileNotFoundError, ProcessLookupError):
            return True
        except (OSError, IndexError):
            return False
        return state in "ZX" or started != self.started


def _state_of(pid: int) -> tuple[str, str]:
    """Return the state letter of a process and its start time."""
    with open(f"/proc/{pid}/stat", encoding="ascii", errors="replace") as file:
        fields = file.read().rpartition(")")[2].split()
    return fields[0], fields[19]


def this_host() -> str:
    """Identify this host and its shared memory: containers may share a host name, but not a mount."""
    try:
        status = os.stat(_FOLDER)
        with open("/proc/sys/kernel/random/boot_id", encoding="ascii") as file:
            return f"{socket.gethostname()}/{file.read().strip()}/{status.st_dev}/{status.st_ino}"
    except OSError:
        return f"{socket.gethostname()}/{os.getpid()}"  # no shared memory: every rank is on its own


def open_window(group: comm.Group, ranks: Sequence[int], timeout: float, slot: int = SLOT) -> HostWindow | None:
    """Open a window for these ranks of one host; return None on all of them if there is no room for it. Collective.

    All ranks of the group call it, each with the ranks of its own host, and with the same `slot`, the size of each of a
    rank's two slots in bytes.
    """
    is_first = group.global_rank == ranks[0]
    size = _PAGE + 2 * slot * len(ranks)
    path = ""
    if is_first and len(ranks) > 1:
        path = _create(size)
    gathered = comm.gather_bytes(path.encode(), group, what="load: opening the window")
    path = gathered[group.ranks.index(ranks[0])].decode()
    descriptor = -1
    if path:
        try:
            descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
        except OSError:
            descriptor = -1
    own = Process.own()
    gathered = comm.gather_bytes(msgspec.json.encode((descriptor >= 0, own)), group, what="load: the window is open")
    opened = [msgspec.json.decode(data, type=tuple[bool, Process | None]) for data in gathered]
    if is_first and path:
        os.unlink(path)
    on_host = [opened[group.ranks.index(rank)] for rank in ranks]
    if not all(is_open for is_open, _ in on_host):
        if descriptor >= 0:
            os.close(descriptor)
        return None
    # A pid is meaningful in its own namespace only: processes of other containers are not checked.
    processes = [process if process and own and process.namespace == own.namespace else None for _, process in on_host]
    return HostWindow(descriptor, slot, ranks.index(group.global_rank), ranks, timeout, processes)


def _create(size: int) -> str:
    """Create and allocate a file of shared memory; return "" if there is no room, leaving some for other processes."""
    path = os.path.join(_FOLDER, f"shardwright-{os.getpid()}-{os.urandom(6).hex()}")
    try:
        room = os.statvfs(_FOLDER)
        if room.f_bavail * room.f_frsize < size + (8 << 20):
            return ""
        descriptor = os.open(path, os.O_CREAT | os.O_EXCL | os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    except OSError:
        return ""
    try:
        os.posix_fallocate(descriptor, 0, size)  # else a full /dev/shm would kill the process with SIGBUS
    except OSError:
        os.unlink(path)
        return ""
    finally:
        os.close(descriptor)
    return path


@final
class HostWindow:
    """The slots of all ranks of a host, and the progress of each rank."""

    def __init__(
        self,
        descriptor: int,
        slot: int,
        own_index: int,
        ranks: Sequence[int],
        timeout: float,
        processes: Sequence[Process | None],
    ) -> None:
        self._descriptor, self._index, self._ranks, self._timeout = descriptor, own_index, ranks, timeout
        self.slot = slot
        self._processes = processes
        self._memory = mmap.mmap(descriptor, _PAGE + 2 * slot * len(ranks))
        self._bytes = torch.frombuffer(self._memory, dtype=torch.uint8)

    def run(self, count: int, read: Callable[[int, Tensor], None], copy: Callable[[int, Tensor], None]) -> None:
        """Run segments 0 to `count` - 1: each is read by one rank and copied by all. All ranks of the host call it.

        `read(segment, slot)` fills a slot with a segment, `copy(segment, slot)` copies from it. If a rank raises, the
        others stop with a `RankLostError`.
        """
        size = len(self._ranks)
        rounds = -(-count // size)
        try:
            for number in range(rounds + 1):
                if number < rounds:
                    self._fill(number, number * size + self._index, count, read)
                if number:
                    self._copy(number - 1, count, copy)
        except BaseException:
            self.fail()
            raise

    def fail(self) -> None:
        """Publish that this rank has failed."""
        self._publish(0, _FAILED)
        self._publish(1, _FAILED)

    def close(self) -> None:
        """Unmap and close the window."""
        del self._bytes
        self._memory.close()
        os.close(self._descriptor)

    def _fill(self, number: int, segment: int, count: int, read: Callable[[int, Tensor], None]) -> None:
        self._await(1, number - 1, range(len(self._ranks)))  # the slot was used two rounds ago: all have copied from it
        if segment < count:
            read(segment, self._slot(self._index, number))
        self._publish(0, number + 1)

    def _copy(self, number: int, count: int, copy: Callable[[int, Tensor], None]) -> None:
        size = len(self._ranks)
        # Each rank begins with its own slot: it is in the cache, and not all wait for the same rank.
        for step in range(size):
            owner = (self._index + step) % size
            segment = number * size + owner
            if segment < count:
                self._await(0, number + 1, (owner,))
                copy(segment, self._slot(owner, number))
        self._publish(1, number + 1)

    def _slot(self, owner: int, number: int) -> Tensor:
        start = _PAGE + (2 * owner + number % 2) * self.slot
        return self._bytes[start : start + self.slot]

    def _publish(self, column: int, number: int) -> None:
        os.pwrite(self._descriptor, _NUMBER.pack(number), 8 * (2 * self._index + column))

    def _await(self, column: int, number: int, owners: Sequence[int]) -> None:
        started = time.monotonic()
        next_check = started + _CHECK_INTERVAL
        for owner in owners:
            pause = 0.0
            while (now := self._progress_of(owner, column)) < number:
                time.sleep(pause)
                pause = min(0.002, pause + 0.00005)
                clock = time.monotonic()
                if clock > next_check:
                    self._check_processes()
                    next_check = clock + _CHECK_INTERVAL
                if clock - started > self._timeout:
                    raise RankLostError(
                        f"load: rank {self._ranks[owner]} did not read its part within {self._timeout:g} s",
                        (self._ranks[owner],),
                    )
            if now == _FAILED:
                raise RankLostError(f"load: rank {self._ranks[owner]} failed while reading", (self._ranks[owner],))

    def _check_processes(self) -> None:
        gone = tuple(
            rank for rank, process in zip(self._ranks, self._processes, strict=True) if process and process.is_gone()
        )
        if gone:
            raise RankLostError(
                f"load: rank {', '.join(map(str, gone))} ended while the ranks of its host read together", gone
            )

    def _progress_of(self, owner: int, column: int) -> int:
        return int(_NUMBER.unpack(os.pread(self._descriptor, 8, 8 * (2 * owner + column)))[0])
