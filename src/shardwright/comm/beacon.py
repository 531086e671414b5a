"""Asking another rank where it is, while its program runs or waits.

Each rank has a socket on which a thread of its own answers. The system accepts connections for a process whatever it
is doing, and refuses them once it has ended: so a rank that computes for an hour is never taken for a dead one, and a
dead one is known at once, whoever else holds its other connections open.
"""

from __future__ import annotations

import errno
import ipaddress
import json
import secrets
import selectors
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from enum import Enum
from typing import TYPE_CHECKING, Any, NamedTuple, final

from shardwright.comm.forked import close_in_children
from shardwright.comm.rendezvous import addresses, listener, machine

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store

__all__ = ["Beacon", "Reply", "State", "ask"]

_REQUEST = struct.Struct("!16sI")  # the token, and for which rank it is asked
_ANSWERING = 2.0  # seconds for one who asks to say so


class State(Enum):
    """What is known of a rank that was asked."""

    HERE = "it has answered"
    SILENT = "its process is there, but has not answered yet"
    ENDED = "its process has ended"
    UNREACHABLE = "its host does not answer"
    UNKNOWN = "it has not told where to ask"


class Reply(NamedTuple):
    """The answer of a rank, and what `describe` gave there if it has answered."""

    state: State
    body: dict[str, Any]


@final
class Beacon:
    """Answers other ranks from a thread, with what `describe(rank that asks)` returns at that moment.

    Those who ask must know the token, 16 bytes in hexadecimal, which stands in the store.
    """

    def __init__(self, store: Store, key: str, describe: Callable[[int], dict[str, Any]], token: str = "") -> None:
        self._listener = listener(backlog=128)
        self._wake, self._woken = socket.socketpair()
        for sock in (self._wake, self._woken):
            close_in_children(sock)
        self._token = token or secrets.token_hex(16)
        self._describe = describe
        bound, port = self._listener.getsockname()[:2]
        place = {
            "machine": machine(),
            "bound": bound,
            "addresses": addresses(),
            "port": port,
            "token": self._token,
        }
        store.set(key, json.dumps(place))
        self._thread = threading.Thread(target=self._serve, name="shardwright beacon", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Stop answering."""
        self._wake.close()
        if threading.current_thread() is not self._thread:
            self._thread.join(_ANSWERING + 1)

    def _serve(self) -> None:
        with selectors.DefaultSelector() as selector, self._listener, self._woken:
            selector.register(self._listener, selectors.EVENT_READ)
            selector.register(self._woken, selectors.EVENT_READ)
            while True:
                ready = [key.fileobj for key, _ in selector.select()]
                if self._woken in ready:
                    return
                with suppress(OSError):  # one who asks and goes away
                    sock, _ = self._listener.accept()
                    with sock:
                        self._answer(sock)

    def _answer(self, sock: socket.socket) -> None:
        sock.settimeout(_ANSWERING)
        request = b""
        while len(request) < _REQUEST.size:
            part = sock.recv(_REQUEST.size - len(request))
            if not part:
                return
            request += part
        token, rank = _REQUEST.unpack(request)
        if token.hex() == self._token:
            sock.sendall(json.dumps(self._describe(rank)).encode())


def ask(places: Mapping[int, dict[str, Any]], asker: int, timeout: float) -> dict[int, Reply]:
    """Ask ranks, by what they wrote in the store, on behalf of the rank `asker`; wait at most `timeout` seconds.

    A rank is asked under all its addresses: one that refuses may belong to another host.
    """
    found = {rank: Reply(State.UNKNOWN, {}) for rank in places}
    calls: dict[socket.socket, tuple[int, bytearray]] = {}
    with selectors.DefaultSelector() as selector:
        for rank, place in places.items():
            for address in _addresses_to_ask(place):
                sock = socket.socket(socket.AF_INET6 if ":" in address else socket.AF_INET, socket.SOCK_STREAM)
                sock.setblocking(False)
                code = sock.connect_ex((address, place["port"]))
                if code in (0, errno.EINPROGRESS):
                    calls[sock] = (rank, bytearray())
                    selector.register(sock, selectors.EVENT_WRITE)
                else:
                    sock.close()
                    found[rank] = _surer(found[rank], Reply(_failure(code), {}))
        deadline = time.monotonic() + timeout
        connected: set[socket.socket] = set()
        while calls and (left := deadline - time.monotonic()) > 0:
            for key, _ in selector.select(left):
                sock = key.fileobj  # type: ignore[assignment]  # those that were registered
                if sock not in calls:
                    continue
                rank, heard = calls[sock]
                reply = _go_on(sock, heard, connected, places[rank], asker)
                if reply is not None:
                    found[rank] = _surer(found[rank], reply)
                    answered = reply.state is State.HERE
                    for done in [each for each, (of, _) in calls.items() if each is sock or (answered and of == rank)]:
                        selector.unregister(done)
                        done.close()
                        del calls[done]
                elif sock in connected:
                    selector.modify(sock, selectors.EVENT_READ)
        for sock, (rank, _) in calls.items():
            found[rank] = _surer(found[rank], Reply(State.SILENT if sock in connected else State.UNREACHABLE, {}))
            sock.close()
    return found


_SUREST_FIRST = (State.HERE, State.SILENT, State.ENDED, State.UNREACHABLE, State.UNKNOWN)


def _surer(one: Reply, other: Reply) -> Reply:
    """Return which of two replies under different addresses of a rank says more of it."""
    return min(one, other, key=lambda reply: _SUREST_FIRST.index(reply.state))


def _go_on(
    sock: socket.socket, heard: bytearray, connected: set[socket.socket], place: dict[str, Any], asker: int
) -> Reply | None:
    """Take the next step of a conversation; return how it ended, once it has."""
    try:
        if sock not in connected:
            code = sock.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
            if code:
                return Reply(_failure(code), {})
            sock.sendall(_REQUEST.pack(bytes.fromhex(place["token"]), asker))
            connected.add(sock)
            return None
        data = sock.recv(1 << 16)
    except BlockingIOError:
        return None
    except OSError:
        return Reply(State.SILENT, {})
    if data:
        heard += data
        return None
    try:
        return Reply(State.HERE, json.loads(heard))
    except ValueError:  # it has closed the connection before the end of its answer
        return Reply(State.SILENT, {})


def _failure(code: int) -> State:
    return State.ENDED if code == errno.ECONNREFUSED else State.UNREACHABLE


def _addresses_to_ask(place: dict[str, Any]) -> list[str]:
    """Return the addresses to ask at: a loopback address means this machine, so it is of no use for another one."""
    if place.get("machine") == machine():
        bound: str = place.get("bound", "")
        return ["127.0.0.1" if bound in ("", "::", "0.0.0.0") else bound]
    usable: Iterable[str] = place.get("addresses", ())
    return [one for one in usable if not ipaddress.ip_address(one.partition("%")[0]).is_loopback]
