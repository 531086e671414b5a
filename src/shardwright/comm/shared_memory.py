"""Shared memory between the ranks of a group that are on one host.

gloo sends messages through TCP: the kernel copies every byte twice, a thread of gloo takes part in each message, and
it competes with the program for the lock of the connection. Ranks of one host copy messages into memory that all of
them map instead, and send a short note through a Unix socket, for which the receiver itself waits. Messages have the
same tags as those through gloo, so they match in the same way.

Whether a group shares memory is agreed in its first two collectives. In the first, every rank tells the others its host
and how to reach its memory and its socket; in the second, whether it could reach theirs. From the third on, all know.
"""

from __future__ import annotations

import mmap
import os
import secrets
import socket
import struct
import sys
import threading
import time
from collections import deque
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple, TypeAlias, final
from weakref import finalize

import torch
import torch.distributed as dist
from torch import Tensor

from shardwright.comm.forked import close_in_children

__all__ = ["Introduction", "SharedMemory", "is_shareable", "may_share"]

_SIZE = 64 << 20  # bytes of a rank's memory for messages of one group; only pages that are used exist
_SLOTS = 512  # messages at a time
_MAX_RANKS = 64
_HEADER = _SLOTS * _MAX_RANKS  # a byte for each message and rank: whether the rank has read it
_MAX_BYTES = _SIZE // 4
_ALIGNMENT = 64
_SLICE = 0.5  # seconds per wait, after which another thread may have read the note
_PAUSE = 0.001  # seconds between two attempts to send what there was no room for

_HELLO = struct.Struct("!64s32sQQ")  # host, name of the socket, process, file descriptor; an empty host shares nothing
_NOTE = struct.Struct("!QQQQ")  # the tag of a message, its slot, its offset and its bytes


def is_shareable(nbytes: int) -> bool:
    """Return whether messages of this size are sent through shared memory: those that are not very large.

    >>> is_shareable(100), is_shareable(1 << 40)
    (True, False)
    """
    return nbytes <= _MAX_BYTES


def may_share(process_group: dist.ProcessGroup | None) -> bool:
    """Return whether the ranks of a group are to find out if they share memory; the same on all of them."""
    if process_group is None or not 1 < process_group.size() <= _MAX_RANKS:
        return False
    return "gloo" in dist.get_backend_config(process_group)


Arrived: TypeAlias = tuple[int, Tensor]  # the slot of a message and its memory; a negative slot: private memory
Place: TypeAlias = tuple[int, int]  # of a message: its slot and its offset; a negative slot has no room


class _Unplaced(NamedTuple):
    tag: int
    data: Tensor
    readers: tuple[int, ...]


class _Message(NamedTuple):
    offset: int
    nbytes: int
    readers: tuple[int, ...]


@final
class _Mapped:
    """Memory that several processes map."""

    def __init__(self, descriptor: int) -> None:
        self.map = mmap.mmap(descriptor, _SIZE)
        self.bytes = torch.frombuffer(self.map, dtype=torch.uint8)


@final
class _Own:
    """This rank's memory for messages to the other ranks of a group."""

    def __init__(self) -> None:
        self.descriptor = os.memfd_create("shardwright")
        os.ftruncate(self.descriptor, _SIZE)
        self.mapped = _Mapped(self.descriptor)
        self._messages: dict[int, _Message] = {}  # that are not read yet, by slot
        self._unused = list(range(_SLOTS))
        self._lock = threading.Lock()
        finalize(self, os.close, self.descriptor)

    def reserve(self, nbytes: int, readers: tuple[int, ...]) -> Place:
        """Return the slot and the offset of memory for a message to these ranks; (-1, 0) if there is no room."""
        with self._lock:
            self._free_read()
            offset = self._room(nbytes)
            if not self._unused or offset < 0:
                return -1, 0
            slot = self._unused.pop()
            self._messages[slot] = _Message(offset, nbytes, readers)
        for reader in readers:
            self.mapped.map[slot * _MAX_RANKS + reader] = 0
        return slot, offset

    def _free_read(self) -> None:
        flags = self.mapped.map
        for slot, message in list(self._messages.items()):
            first = slot * _MAX_RANKS
            if all(flags[first + reader] for reader in message.readers):
                del self._messages[slot]
                self._unused.append(slot)

    def _room(self, nbytes: int) -> int:
        """Return the first offset with so many free bytes, so that the same memory is used again and again."""
        offset = _HEADER
        for message in sorted(self._messages.values()):
            if message.offset - offset >= nbytes:
                break
            offset = -(-(message.offset + message.nbytes) // _ALIGNMENT) * _ALIGNMENT
        return offset if offset + nbytes <= _SIZE else -1


@final
class _Peer:
    """Another rank: its memory, and the connection to it."""

    def __init__(self, memory: _Mapped, sock: socket.socket) -> None:
        self.memory, self.sock = memory, sock
        seconds, fraction = divmod(_SLICE, 1)
        sock.setblocking(True)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, struct.pack("ll", int(seconds), int(fraction * 1e6)))
        self.arrived: dict[int, deque[Arrived]] = {}  # by tag
        self.unsent: deque[bytes] = deque()  # notes for which the socket had no room


@final
class SharedMemory:
    """The memory of all ranks of a group, of which this one is `rank`; `timeout` is that of waits, in seconds."""

    def __init__(self, own: _Own, peers: dict[int, _Peer], rank: int, timeout: float) -> None:
        self._own, self._peers, self._rank, self._timeout = own, peers, rank, timeout
        self._unplaced: deque[_Unplaced] = deque()  # messages for which shared memory had no room
        self._lock = threading.Lock()

    def room(self, nbytes: int, readers: tuple[int, ...]) -> tuple[Place, Tensor]:
        """Return memory for a message to these ranks, to be filled and passed to `send` with its place.

        If shared memory is full, it is private memory, which `send` copies when there is room.
        """
        place = self._own.reserve(nbytes, readers)
        if place[0] < 0:
            return place, torch.empty(nbytes, dtype=torch.uint8)
        return place, self._own.mapped.bytes[place[1] : place[1] + nbytes]

    def send(self, readers: tuple[int, ...], tag: int, place: Place, data: Tensor) -> bool:
        """Tell ranks where a message is; return False if it has to wait for room, see `flush`.

        Raise RuntimeError if a rank is gone.
        """
        with self._lock:
            if place[0] < 0:
                self._unplaced.append(_Unplaced(tag, data, readers))
                return False
            return self._tell(readers, tag, place, data.nbytes)

    def flush(self) -> None:
        """Return when all messages are sent; raise RuntimeError if that takes too long."""
        deadline = time.monotonic() + self._timeout
        while not self._pump():
            self._pause(deadline)

    def receive(self, peer: int, tag: int, target: Tensor) -> None:
        """Wait for a message and read it; raise RuntimeError if none comes."""
        slot, message = self.arrive(peer, tag)
        target.copy_(message)
        self.free(peer, slot)

    def arrive(self, peer: int, tag: int) -> Arrived:
        """Wait for a message and return its slot, for `free`, and its memory; raise RuntimeError if none comes."""
        other = self._peers[peer]
        arrived = other.arrived
        if tag not in arrived:
            self._wait(other, tag)
        with self._lock:
            messages = arrived[tag]
            message = messages.popleft()
            if not messages:
                del arrived[tag]
        return message

    def free(self, peer: int, slot: int) -> None:
        """Tell the sender of a message that this rank has read it."""
        if slot < 0:
            return
        with self._lock:  # the message is read before the flag is set, on every processor
            self._peers[peer].memory.map[slot * _MAX_RANKS + self._rank] = 1

    def abort(self) -> None:
        """End all waits, here and on the other ranks: their connections close."""
        for peer in self._peers.values():
            with suppress(OSError):
                peer.sock.shutdown(socket.SHUT_RDWR)

    def _wait(self, other: _Peer, tag: int) -> None:
        """Read notes until that of a message has come."""
        deadline = 0.0
        while tag not in other.arrived:
            if not self._pump():  # others may wait for what this rank could not send yet
                deadline = deadline or time.monotonic() + self._timeout
                self._pause(deadline)
                continue
            if not _read(other, 0):  # a slice of the wait is over
                deadline = deadline or time.monotonic() + self._timeout - _SLICE
                self._make_room()
                self._check(deadline)

    def _check(self, deadline: float) -> None:
        if time.monotonic() > deadline:
            self.abort()
            raise RuntimeError(f"timed out after {self._timeout:g} s waiting for a message in shared memory")

    def _pause(self, deadline: float) -> None:
        """Read all notes that have come, so that the others can send more, and wait a little."""
        for peer in self._peers.values():
            while _read(peer, socket.MSG_DONTWAIT):
                pass
        self._make_room()
        time.sleep(_PAUSE)
        self._check(deadline)

    def _make_room(self) -> None:
        """Copy what has arrived to private memory: what this rank waits for may have no room, where the sender is."""
        for index, peer in self._peers.items():
            with self._lock:
                messages = [each for each in peer.arrived.values() if any(slot >= 0 for slot, _ in each)]
                copied = [(slot, message) for each in messages for slot, message in each if slot >= 0]
                for each in messages:
                    each.extend([(-1, message if slot < 0 else message.clone()) for slot, message in each])
                    for _ in range(len(each) // 2):
                        each.popleft()
            for slot, _ in copied:
                self.free(index, slot)

    def _pump(self) -> bool:
        """Send what there is room for; return whether everything is sent."""
        if not self._unplaced and not any(peer.unsent for peer in self._peers.values()):
            return True
        with self._lock:
            for peer in self._peers.values():
                _push(peer)
            while self._unplaced:
                tag, data, readers = self._unplaced[0]
                slot, offset = place = self._own.reserve(data.nbytes, readers)
                if slot < 0:
                    return False
                self._own.mapped.bytes[offset : offset + data.nbytes].copy_(data)
                self._unplaced.popleft()
                self._tell(readers, tag, place, data.nbytes)
            return not any(peer.unsent for peer in self._peers.values())

    def _tell(self, readers: tuple[int, ...], tag: int, place: Place, nbytes: int) -> bool:
        note = _NOTE.pack(tag, *place, nbytes)
        sent = True
        for reader in readers:
            to = self._peers[reader]
            to.unsent.append(note)
            sent = _push(to) and sent
        return sent


def _push(to: _Peer) -> bool:
    """Send notes as long as the socket has room; return whether all are sent."""
    try:
        while to.unsent:
            to.sock.send(to.unsent[0], socket.MSG_DONTWAIT | socket.MSG_NOSIGNAL)
            to.unsent.popleft()
    except BlockingIOError:
        return False
    except OSError as error:
        raise RuntimeError(f"connection closed by peer: {error}") from error
    return True


def _read(other: _Peer, flags: int) -> bool:
    """Read notes; return False if none has come."""
    try:
        notes = other.sock.recv(_NOTE.size * 64, flags)  # a whole number of them: each is sent at once
    except BlockingIOError:
        return False
    except OSError as error:
        raise RuntimeError(f"connection closed by peer: {error}") from error
    if not notes:
        raise RuntimeError("connection closed by peer")
    for tag, slot, offset, nbytes in _NOTE.iter_unpack(notes):
        other.arrived.setdefault(tag, deque()).append((slot, other.memory.bytes[offset : offset + nbytes]))
    return True


@final
class Introduction:
    """How the ranks of a group find out whether they share memory.

    Every rank sends `hello` to all others in the first collective of the group, and the result of `answer` in the
    second; `result` is the same on all ranks.
    """

    def __init__(self, rank: int, timeout: float) -> None:
        self._rank, self._timeout = rank, timeout
        self._own: _Own | None = None
        self._memory: dict[int, _Mapped] = {}
        self._sockets: dict[int, socket.socket] = {}
        self._name = secrets.token_hex(16).encode()
        self._listener = _closed_with(self, socket.socket(socket.AF_UNIX, socket.SOCK_STREAM))
        if sys.platform == "linux":
            with suppress(OSError, ValueError):  # no descriptors, or no address space
                self._listener.bind(b"\0" + self._name)  # a name without a file, gone with the socket
                self._listener.listen(_MAX_RANKS)
                self._own = _Own()

    def hello(self) -> bytes:
        """Return where this rank is and how to reach it; as many bytes on every rank."""
        if self._own is None:
            return _HELLO.pack(b"", b"", 0, 0)
        return _HELLO.pack(_host(), self._name, os.getpid(), self._own.descriptor)

    def answer(self, hellos: Mapping[int, bytes]) -> bytes:
        """Open the memory of the others, connect to those after this one, and return one byte: whether that worked."""
        mine = _HELLO.unpack(self.hello())[0]
        for peer, hello in hellos.items():
            host, name, process, descriptor = _HELLO.unpack(hello)
            if host != mine or not host.strip(b"\0"):
                continue
            with suppress(OSError, ValueError):
                memory = _open(process, descriptor)
                if peer > self._rank:
                    sock = _closed_with(memory, socket.socket(socket.AF_UNIX, socket.SOCK_STREAM))
                    sock.connect(b"\0" + name)
                    sock.sendall(bytes([self._rank]))
                    self._sockets[peer] = sock
                self._memory[peer] = memory
        return bytes([len(self._memory) == len(hellos)])

    def result(self, answers: Mapping[int, bytes]) -> SharedMemory | None:
        """Return the memory of the group; None if a rank cannot share memory with all others."""
        try:
            if self._own is None or len(self._memory) < len(answers) or not all(each[0] for each in answers.values()):
                return None
            for _ in range(self._rank):  # those before this one are connected: they have answered
                sock, _ = self._listener.accept()
                peer = sock.recv(1)[0]
                self._sockets[peer] = _closed_with(self._memory[peer], sock)
        finally:
            self._listener.close()
        peers = {peer: _Peer(memory, self._sockets[peer]) for peer, memory in self._memory.items()}
        return SharedMemory(self._own, peers, self._rank, self._timeout)


def _closed_with(owner: object, sock: socket.socket) -> socket.socket:
    """Return a socket that is closed when its owner is gone, and in forked children."""
    close_in_children(sock)
    finalize(owner, sock.close)
    return sock


def _open(process: int, descriptor: int) -> _Mapped:
    opened = os.open(f"/proc/{process}/fd/{descriptor}", os.O_RDWR)
    try:
        return _Mapped(opened)
    finally:
        os.close(opened)


def _host() -> bytes:
    """Return what is the same in processes that can reach each other's memory: the kernel, and the namespaces."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        namespaces = [os.stat(f"/proc/self/ns/{name}").st_ino for name in ("pid", "net")]
        return " ".join([boot, *map(str, namespaces)]).encode()[:64]
    except OSError:
        return b""
