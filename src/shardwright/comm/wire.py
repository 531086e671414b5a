"""Frames over a TCP connection between two ranks.

gloo does not serve here: its receives cannot be polled, a timeout on one closes every connection of its group, and it
blocks Ctrl-C. Here each connection fails by itself, at once, so that dead ranks can be identified.
"""

from __future__ import annotations

import select
import selectors
import socket
import struct
import time
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass
from enum import IntEnum
from typing import final

from shardwright.comm.forked import close_in_children

__all__ = ["Frame", "Kind", "Link", "LinkError", "fail_when_unreachable", "readable"]

_HEADER = struct.Struct("!BIQ")


class Kind(IntEnum):
    """The kind of a frame."""

    HELLO = 1  # from a child, once: its index
    HERE = 2  # a rank has arrived in this round: restart the timeout
    UP = 3  # from a child: the payloads of its subtree
    DOWN = 4  # from the parent: the payloads of all ranks
    LOST = 5  # a rank is lost: forward it


@dataclass(frozen=True, slots=True)
class Frame:
    """One message: its kind, its round and its bytes."""

    kind: Kind
    round: int
    body: bytes = b""


class LinkError(Exception):
    """The peer has closed the connection, or does not receive."""


@final
class Link:
    """One end of a connection that sends and receives complete frames; a dead peer raises `LinkError`."""

    def __init__(self, sock: socket.socket) -> None:
        sock.setblocking(False)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        fail_when_unreachable(sock)
        close_in_children(sock)
        self.sock = sock
        self.frames: deque[Frame] = deque()
        self._bytes = bytearray()

    def send(self, frame: Frame, timeout: float) -> None:
        """Send a frame, or raise `LinkError`."""
        rest = memoryview(_HEADER.pack(frame.kind, frame.round, len(frame.body)) + frame.body)
        deadline = time.monotonic() + timeout
        while rest:
            try:
                rest = rest[self.sock.send(rest) :]
            except BlockingIOError:
                left = deadline - time.monotonic()
                if left <= 0:
                    raise LinkError(f"received no message within {timeout:g} s") from None
                _wait_writable(self.sock, left)
            except OSError as error:
                raise LinkError(f"closed its connection ({error.strerror or error})") from error

    def pull(self) -> None:
        """Append the frames that have arrived to `frames`; raise `LinkError` at the end of the stream."""
        try:
            data = self.sock.recv(1 << 20)
        except BlockingIOError:
            return
        except OSError as error:
            raise LinkError(f"closed its connection ({error.strerror or error})") from error
        if not data:
            raise LinkError("closed its connection")
        self._bytes += data
        while len(self._bytes) >= _HEADER.size:
            kind, number, length = _HEADER.unpack_from(self._bytes)
            end = _HEADER.size + length
            if len(self._bytes) < end:
                break
            self.frames.append(Frame(Kind(kind), number, bytes(self._bytes[_HEADER.size : end])))
            del self._bytes[:end]

    def close(self) -> None:
        """Close the connection."""
        self.sock.close()


def fail_when_unreachable(sock: socket.socket) -> None:
    """Make a connection fail about 8 s after the other host became unreachable, which does not close it by itself.

    An idle connection is probed after 5 s and given up after 3 probes. While data is unacknowledged, the system does
    not probe but retransmits, for 15 minutes by default: that is limited to 8 s, too.
    """
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for option, value in (
        ("TCP_KEEPIDLE", 5),
        ("TCP_KEEPINTVL", 1),
        ("TCP_KEEPCNT", 3),
        ("TCP_USER_TIMEOUT", 8000),  # milliseconds
    ):
        if hasattr(socket, option):
            sock.setsockopt(socket.IPPROTO_TCP, getattr(socket, option), value)


def _wait_writable(sock: socket.socket, timeout: float) -> None:
    poll = select.poll()  # unlike select(), supports any file descriptor
    poll.register(sock, select.POLLOUT)
    poll.poll(timeout * 1000)


def readable(sockets: Iterable[socket.socket], timeout: float) -> list[socket.socket]:
    """Block until at least one socket is readable (or timeout) and return the readable ones."""
    with selectors.DefaultSelector() as selector:
        for sock in sockets:
            selector.register(sock, selectors.EVENT_READ)
        return [key.fileobj for key, _ in selector.select(timeout) if isinstance(key.fileobj, socket.socket)]
