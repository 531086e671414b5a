"""Status queries to other ranks, while their programs compute or wait.

A thread of each rank answers on a listening socket. The operating system accepts connections for a process whatever it
is doing, and refuses them once it has exited: so a rank that computes for an hour is never taken for dead, and a dead
rank is known at once, whoever holds its other connections open.
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
from shardwright.comm.rendezvous import addresses, listening_socket, machine

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store

__all__ = ["Beacon", "Reply", "State", "ask"]

_REQUEST = struct.Struct("!16sI")  # the token, and the rank on whose behalf the query is sent
_REQUEST_SECONDS = 2.0  # timeout for receiving a request


class State(Enum):
    """The state of a queried rank."""

    ANSWERED = "it has answered"
    SILENT = "its process is running, but has not answered yet"
    ENDED = "its process has ended"
    UNREACHABLE = "its host does not answer"
    UNKNOWN = "it has not published its address"


class Reply(NamedTuple):
    """The reply of a rank; `body` is the result of `describe` there if it has answered."""

    state: State
    body: dict[str, Any]


@final
class Beacon:
    """Answers queries of other ranks from a thread, with the current result of `describe(asking rank)`.

    Queries must carry the token, 16 bytes in hexadecimal, which is published in the store.
    """

    def __init__(self, store: Store, key: str, describe: Callable[[int], dict[str, Any]], token: str = "") -> None:
        self._listener = listening_socket(backlog=128)
        self._wake, self._woken = socket.socketpair()
        for sock in (self._wake, self._woken):
            close_in_children(sock)
        self._token = token or secrets.token_hex(16)
        self._describe = describe
        bound, port = self._listener.getsockname()[:2]
        endpoint = {
            "machine": machine(),
            "bound": bound,
            "addresses": addresses(),
            "port": port,
            "token": self._token,
        }
        store.set(key, json.dumps(endpoint))
        self._thread = threading.Thread(target=self._serve, name="shardwright beacon", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Stop answering."""
        self._wake.close()
        if threading.current_thread() is not self._thread:
            self._thread.join(_REQUEST_SECONDS + 1)

    def _serve(self) -> None:
        with selectors.DefaultSelector() as selector, self._listener, self._woken:
            selector.register(self._listener, selectors.EVENT_READ)
            selector.register(self._woken, selectors.EVENT_READ)
            while True:
                ready = [key.fileobj for key, _ in selector.select()]
                if self._woken in ready:
                    return
                with suppress(OSError):  # the asking rank has disconnected
                    sock, _ = self._listener.accept()
                    with sock:
                        self._answer(sock)

    def _answer(self, sock: socket.socket) -> None:
        sock.settimeout(_REQUEST_SECONDS)
        request = b""
        while len(request) < _REQUEST.size:
            part = sock.recv(_REQUEST.size - len(request))
            if not part:
                return
            request += part
        token, rank = _REQUEST.unpack(request)
        if token.hex() == self._token:
            sock.sendall(json.dumps(self._describe(rank)).encode())


def ask(published: Mapping[int, dict[str, Any]], asker: int, timeout: float) -> dict[int, Reply]:
    """Query ranks at the addresses they published, on behalf of rank `asker`, for at most `timeout` seconds.

    A rank is queried at all its addresses: one that refuses may belong to another host.
    """
    replies = {rank: Reply(State.UNKNOWN, {}) for rank in published}
    calls: dict[socket.socket, tuple[int, bytearray]] = {}
    with selectors.DefaultSelector() as selector:
        for rank, endpoint in published.items():
            for address in _usable_addresses(endpoint):
                sock = socket.socket(socket.AF_INET6 if ":" in address else socket.AF_INET, socket.SOCK_STREAM)
                sock.setblocking(False)
                code = sock.connect_ex((address, endpoint["port"]))
                if code in (0, errno.EINPROGRESS):
                    calls[sock] = (rank, bytearray())
                    selector.register(sock, selectors.EVENT_WRITE)
                else:
                    sock.close()
                    replies[rank] = _more_certain(replies[rank], Reply(_failure(code), {}))
        deadline = time.monotonic() + timeout
        connected: set[socket.socket] = set()
        while calls and (left := deadline - time.monotonic()) > 0:
            for key, _ in selector.select(left):
                sock = key.fileobj  # type: ignore[assignment]  # only sockets are registered
                if sock not in calls:
                    continue
                rank, received = calls[sock]
                reply = _advance(sock, received, connected, published[rank], asker)
                if reply is not None:
                    replies[rank] = _more_certain(replies[rank], reply)
                    answered = reply.state is State.ANSWERED
                    for done in [s for s, (peer, _) in calls.items() if s is sock or (answered and peer == rank)]:
                        selector.unregister(done)
                        done.close()
                        del calls[done]
                elif sock in connected:
                    selector.modify(sock, selectors.EVENT_READ)
        for sock, (rank, _) in calls.items():
            replies[rank] = _more_certain(
                replies[rank], Reply(State.SILENT if sock in connected else State.UNREACHABLE, {})
            )
            sock.close()
    return replies


_BY_CERTAINTY = (State.ANSWERED, State.SILENT, State.ENDED, State.UNREACHABLE, State.UNKNOWN)


def _more_certain(left: Reply, right: Reply) -> Reply:
    """Return the more conclusive of two replies from different addresses of a rank."""
    return min(left, right, key=lambda reply: _BY_CERTAINTY.index(reply.state))


def _advance(
    sock: socket.socket, received: bytearray, connected: set[socket.socket], endpoint: dict[str, Any], asker: int
) -> Reply | None:
    """Continue an exchange; return the reply once it is complete, else None."""
    try:
        if sock not in connected:
            code = sock.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
            if code:
                return Reply(_failure(code), {})
            sock.sendall(_REQUEST.pack(bytes.fromhex(endpoint["token"]), asker))
            connected.add(sock)
            return None
        data = sock.recv(1 << 16)
    except BlockingIOError:
        return None
    except OSError:
        return Reply(State.SILENT, {})
    if data:
        received += data
        return None
    try:
        return Reply(State.ANSWERED, json.loads(received))
    except ValueError:  # the connection was closed before the end of the reply
        return Reply(State.SILENT, {})


def _failure(code: int) -> State:
    return State.ENDED if code == errno.ECONNREFUSED else State.UNREACHABLE


def _usable_addresses(endpoint: dict[str, Any]) -> list[str]:
    """Return the addresses to query; loopback addresses of another machine are useless."""
    if endpoint.get("machine") == machine():
        bound: str = endpoint.get("bound", "")
        return ["127.0.0.1" if bound in ("", "::", "0.0.0.0") else bound]
    published: Iterable[str] = endpoint.get("addresses", ())
    return [address for address in published if not ipaddress.ip_address(address.partition("%")[0]).is_loopback]
