"""Frames on a TCP connection between two ranks.

Why not gloo: its receives cannot be polled, a timeout on one closes every connection of its group, and Ctrl-C
does not get through while it waits. Here each connection fails on its own, at once, so the dead can be named.
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
    """What a frame says."""

    HELLO = 1  # from below, once: who I am
    HERE = 2  # someone has arrived in this round: be patient anew
    UP = 3  # from below: all that my part of the tree has to say
    DOWN = 4  # from above: all that everybody has to say
    LOST = 5  # a rank is lost: pass it on


@dataclass(frozen=True, slots=True)
class Frame:
    """One message: its kind, the round it belongs to, its bytes."""

    kind: Kind
    round: int
    body: bytes = b""


class LinkError(Exception):
    """The other end is gone, or does not take what it is sent."""


@final
class Link:
    """One end of a connection: frames go in and out whole, and a dead peer is a `LinkError`."""

    def __init__(self, sock: socket.socket) -> None:
        sock.setblocking(False)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        fail_when_unreachable(sock)
        close_in_children(sock)
        self.sock = sock
        self.frames: deque[Frame] = deque()
        self._bytes = bytearray()

    def send(self, frame: Frame, timeout: float) -> None:
        """Sends a frame whole, or raises `LinkError`."""
        rest = memoryview(_HEADER.pack(frame.kind, frame.round, len(frame.body)) + frame.body)
        deadline = time.monotonic() + timeout
        while rest:
            try:
                rest = rest[self.sock.send(rest) :]
            except BlockingIOError:
                left = deadline - time.monotonic()
                if left <= 0:
                    raise LinkError(f"took no message within {timeout:g} s") from None
                _wait_writable(self.sock, left)
            except OSError as error:
                raise LinkError(f"closed its connection ({error.strerror or error})") from error

    def pull(self) -> None:
        """Moves the frames that have arrived to `frames`; `LinkError` at the end of the stream."""
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
        """Hangs up."""
        self.sock.close()


def fail_when_unreachable(sock: socket.socket) -> None:
    """Have a connection fail about 8 s after the other host has become unreachable, which closes nothing by itself.

    An idle connection is probed after 5 s, and given up after 3 probes. The system does not probe while something it
    has sent is unacknowledged, and would send it again for 15 minutes: that is given up after 8 s, too.
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
    poll = select.poll()  # unlike select(), takes any file descriptor
    poll.register(sock, select.POLLOUT)
    poll.poll(timeout * 1000)


def readable(sockets: Iterable[socket.socket], timeout: float) -> list[socket.socket]:
    """Those of the sockets that have something to say, waiting for the first to have it."""
    with selectors.DefaultSelector() as selector:
        for sock in sockets:
            selector.register(sock, selectors.EVENT_READ)
        return [key.fileobj for key, _ in selector.select(timeout) if isinstance(key.fileobj, socket.socket)]
