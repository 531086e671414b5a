"""A window of memory that the ranks of a host share: one reads a segment into it, all copy what they want.

Each rank has two slots, so that it reads the next segment while the others copy from the last. Ranks tell each other
how far they are by numbers in the window's file, through system calls, which order them with the data. The file has
no name any more once all have opened it: nothing is left behind, however a rank ends. While a rank waits it looks
after the processes of the others, so that one that is killed is missed at once.
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
_LOOK = 0.2  # seconds between two looks at the processes that are waited for


class Process(NamedTuple):
    """A process of this host, in its namespace of numbers, and when it began: numbers are used again."""

    pid: int
    began: str
    namespace: str

    @classmethod
    def own(cls) -> Process | None:
        """This one; None where /proc does not tell."""
        try:
            pid = os.getpid()
            return cls(pid, _state_of(pid)[1], os.readlink("/proc/self/ns/pid"))
        except (OSError, IndexError):
            return None

    def is_gone(self) -> bool:
        """Whether it has ended: its number is free or another's, or it only waits to be collected."""
        try:
            state, began = _state_of(self.pid)
        except (FileNotFoundError, ProcessLookupError):
            return True
        except (OSError, IndexError):
            return False
        return state in "ZX" or began != self.began


def _state_of(pid: int) -> tuple[str, str]:
    """The state of a process, by its letter, and when it began."""
    with open(f"/proc/{pid}/stat", encoding="ascii", errors="replace") as file:
        fields = file.read().rpartition(")")[2].split()
    return fields[0], fields[19]


def this_host() -> str:
    """What tells this host, and its shared memory, from others: containers may share a name, not a mount."""
    try:
        status = os.stat(_FOLDER)
        with open("/proc/sys/kernel/random/boot_id", encoding="ascii") as file:
            return f"{socket.gethostname()}/{file.read().strip()}/{status.st_dev}/{status.st_ino}"
    except OSError:
        return f"{socket.gethostname()}/{os.getpid()}"  # no shared memory to speak of: every rank by itself


def open_window(group: comm.Group, ranks: Sequence[int], timeout: float, slot: int = SLOT) -> HostWindow | None:
    """A window for these ranks of one host; None where there is no room for it, on all of them alike. Collective.

    All ranks of the group call it, each with the ranks of its own host, and with the same `slot`: the bytes of each of
    a rank's two slots.
    """
    leads = group.global_rank == ranks[0]
    size = _PAGE + 2 * slot * len(ranks)
    path = ""
    if leads and len(ranks) > 1:
        path = _create(size)
    said = comm.gather_bytes(path.encode(), group, what="load: opening the window")
    path = said[group.ranks.index(ranks[0])].decode()
    descriptor = -1
    if path:
        try:
            descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
        except OSError:
            descriptor = -1
    own = Process.own()
    said = comm.gather_bytes(msgspec.json.encode((descriptor >= 0, own)), group, what="load: the window is open")
    opened = [msgspec.json.decode(one, type=tuple[bool, Process | None]) for one in said]
    if leads and path:
        os.unlink(path)
    here = [opened[group.ranks.index(rank)] for rank in ranks]
    if not all(is_open for is_open, _ in here):
        if descriptor >= 0:
            os.close(descriptor)
        return None
    # A number means something in its own namespace only: who runs in another container is not looked after.
    processes = [one if one and own and one.namespace == own.namespace else None for _, one in here]
    return HostWindow(descriptor, slot, ranks.index(group.global_rank), ranks, timeout, processes)


def _create(size: int) -> str:
    """A file of shared memory, its pages there; empty text where there is no room, with some to spare for others."""
    path = os.path.join(_FOLDER, f"shardwright-{os.getpid()}-{os.urandom(6).hex()}")
    try:
        room = os.statvfs(_FOLDER)
        if room.f_bavail * room.f_frsize < size + (8 << 20):
            return ""
        descriptor = os.open(path, os.O_CREAT | os.O_EXCL | os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    except OSError:
        return ""
    try:
        os.posix_fallocate(descriptor, 0, size)  # else a full /dev/shm would end the process with a bus error
    except OSError:
        os.unlink(path)
        return ""
    finally:
        os.close(descriptor)
    return path


@final
class HostWindow:
    """The slots of all ranks of a host, and how far each rank is."""

    def __init__(
        self,
        descriptor: int,
        slot: int,
        me: int,
        ranks: Sequence[int],
        timeout: float,
        processes: Sequence[Process | None],
    ) -> None:
        self._descriptor, self._me, self._ranks, self._timeout = descriptor, me, ranks, timeout
        self.slot = slot
        self._processes = processes
        self._memory = mmap.mmap(descriptor, _PAGE + 2 * slot * len(ranks))
        self._bytes = torch.frombuffer(self._memory, dtype=torch.uint8)

    def run(self, count: int, read: Callable[[int, Tensor], None], copy: Callable[[int, Tensor], None]) -> None:
        """Has segments 0 to `count` - 1 read, each by one rank, and copied by all; all ranks of the host call it.

        `read(segment, slot)` fills a slot with a segment, `copy(segment, slot)` takes from it. A rank that raises
        tells the others, which stop with a `RankLostError`.
        """
        size = len(self._ranks)
        rounds = -(-count // size)
        try:
            for number in range(rounds + 1):
                if number < rounds:
                    self._fill(number, number * size + self._me, count, read)
                if number:
                    self._copy(number - 1, count, copy)
        except BaseException:
            self.fail()
            raise

    def fail(self) -> None:
        """Tells the others that this rank will not go on."""
        self._say(0, _FAILED)
        self._say(1, _FAILED)

    def close(self) -> None:
        """Lets go of the memory."""
        del self._bytes
        self._memory.close()
        os.close(self._descriptor)

    def _fill(self, number: int, segment: int, count: int, read: Callable[[int, Tensor], None]) -> None:
        self._await(1, number - 1, range(len(self._ranks)))  # the slot was used two rounds ago: all have copied it
        if segment < count:
            read(segment, self._slot(self._me, number))
        self._say(0, number + 1)

    def _copy(self, number: int, count: int, copy: Callable[[int, Tensor], None]) -> None:
        size = len(self._ranks)
        # Each begins with its own: it is in the cache, and not all wait for the same.
        for step in range(size):
            owner = (self._me + step) % size
            segment = number * size + owner
            if segment < count:
                self._await(0, number + 1, (owner,))
                copy(segment, self._slot(owner, number))
        self._say(1, number + 1)

    def _slot(self, owner: int, number: int) -> Tensor:
        start = _PAGE + (2 * owner + number % 2) * self.slot
        return self._bytes[start : start + self.slot]

    def _say(self, column: int, number: int) -> None:
        os.pwrite(self._descriptor, _NUMBER.pack(number), 8 * (2 * self._me + column))

    def _await(self, column: int, number: int, owners: Sequence[int]) -> None:
        began = time.monotonic()
        look = began + _LOOK
        for owner in owners:
            pause = 0.0
            while (now := self._said(owner, column)) < number:
                time.sleep(pause)
                pause = min(0.002, pause + 0.00005)
                clock = time.monotonic()
                if clock > look:
                    self._look_after_the_others()
                    look = clock + _LOOK
                if clock - began > self._timeout:
                    raise RankLostError(
                        f"load: rank {self._ranks[owner]} did not read its part within {self._timeout:g} s",
                        (self._ranks[owner],),
                    )
            if now == _FAILED:
                raise RankLostError(f"load: rank {self._ranks[owner]} failed while reading", (self._ranks[owner],))

    def _look_after_the_others(self) -> None:
        gone = tuple(rank for rank, one in zip(self._ranks, self._processes, strict=True) if one and one.is_gone())
        if gone:
            raise RankLostError(
                f"load: rank {', '.join(map(str, gone))} ended while the ranks of its host read together", gone
            )

    def _said(self, owner: int, column: int) -> int:
        return int(_NUMBER.unpack(os.pread(self._descriptor, 8, 8 * (2 * owner + column)))[0])
