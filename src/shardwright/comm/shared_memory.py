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
import select
import socket
import struct
import sys
import threading
import time
from collections import deque
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple, final
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

_HELLO = struct.Struct("!64s32sQQ")  # host, name of the socket, process, file descriptor; an empty host shares nothing
_NOTE = struct.Struct("!QqQ")  # the tag of a message, its slot (-1: it follows through gloo) and its offset


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
        self._mapped = _Mapped(self.descriptor)
        self._messages: dict[int, _Message] = {}  # that are not read yet, by slot
        self._unused = list(range(_SLOTS))
        self._lock = threading.Lock()
        finalize(self, os.close, self.descriptor)

    def put(self, data: Tensor, readers: tuple[int, ...]) -> tuple[int, int]:
        """Copy a message for these ranks and return its slot and offset; (-1, 0) if there is no room."""
        with self._lock:
            self._free_read()
            offset = self._room(data.nbytes)
            if not self._unused or offset < 0:
                return -1, 0
            slot = self._unused.pop()
            self._messages[slot] = _Message(offset, data.nbytes, readers)
        for reader in readers:
            self._mapped.map[slot * _MAX_RANKS + reader] = 0
        self._mapped.bytes[offset : offset + data.nbytes].copy_(data)
        return slot, offset

    def _free_read(self) -> None:
        flags = self._mapped.map
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
        self.arrived: dict[int, deque[tuple[int, int]]] = {}  # slots and offsets, by tag
        self.unsent: deque[bytes] = deque()  # notes for which the socket had no room


@final
class SharedMemory:
    """The memory of all ranks of a group, of which this one is `rank`; `timeout` is that of waits, in seconds."""

    def __init__(self, own: _Own, peers: dict[int, _Peer], rank: int, timeout: float) -> None:
        self._own, self._peers, self._rank, self._timeout = own, peers, rank, timeout
        self._lock = threading.Lock()

    def put(self, data: Tensor, readers: tuple[int, ...]) -> tuple[int, int]:
        """Copy a message for these ranks; return where it is, for `send`. A negative slot: there was no room for it."""
        return self._own.put(data, readers)

    def send(self, peer: int, tag: int, place: tuple[int, int]) -> bool:
        """Tell a rank where a message is; return False if that needs `flush`. Raise RuntimeError if it is gone."""
        to = self._peers[peer]
        with self._lock:
            to.unsent.append(_NOTE.pack(tag, *place))
            return self._push(to)

    def flush(self, peer: int) -> None:
        """Send what could not be sent yet."""
        to = self._peers[peer]
        deadline = time.monotonic() + self._timeout
        poll = select.poll()
        poll.register(to.sock, select.POLLOUT)
        while to.unsent:
            poll.poll(1000 * _SLICE)
            with self._lock:
                self._push(to)
            self._check(deadline)

    def receive(self, peer: int, tag: int, target: Tensor) -> bool:
        """Wait for a message and read it; return False if it follows through gloo. Raise RuntimeError if none comes."""
        other = self._peers[peer]
        arrived = other.arrived
        if tag not in arrived:
            self._wait(other, tag)
        notes = arrived[tag]
        slot, offset = notes.popleft()
        if not notes:
            del arrived[tag]
        if slot < 0:
            return False
        memory = other.memory
        target.copy_(memory.bytes[offset : offset + target.nbytes])
        with self._lock:  # the message is read before the flag is set, on every processor
            memory.map[slot * _MAX_RANKS + self._rank] = 1
        return True

    def abort(self) -> None:
        """End all waits, here and on the other ranks: their connections close."""
        for peer in self._peers.values():
            with suppress(OSError):
                peer.sock.shutdown(socket.SHUT_RDWR)

    def _wait(self, other: _Peer, tag: int) -> None:
        """Read notes until that of a message has come."""
        deadline = 0.0
        while tag not in other.arrived:
            if any(peer.unsent for peer in self._peers.values()):
                self._push_all()
            try:
                notes = other.sock.recv(_NOTE.size * 64)  # a whole number of them: each is sent at once
            except BlockingIOError:  # a slice of the wait is over
                deadline = deadline or time.monotonic() + self._timeout - _SLICE
                self._check(deadline)
                continue
            except OSError as error:
                raise RuntimeError(f"connection closed by peer: {error}") from error
            if not notes:
                raise RuntimeError("connection closed by peer")
            for found, slot, offset in _NOTE.iter_unpack(notes):
                other.arrived.setdefault(found, deque()).append((slot, offset))

    def _check(self, deadline: float) -> None:
        if time.monotonic() > deadline:
            self.abort()
            raise RuntimeError(f"timed out after {self._timeout:g} s waiting for a message in shared memory")

    def _push_all(self) -> None:
        with self._lock:
            for peer in self._peers.values():
                if peer.unsent:
                    self._push(peer)

    def _push(self, to: _Peer) -> bool:
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
