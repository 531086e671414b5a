"""Rendezvous: each rank opens a listening socket and publishes its address in the store."""

from __future__ import annotations

import json
import os
import secrets
import socket
import struct
import time
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any, final

import torch.distributed as dist

from shardwright.comm.forked import close_in_children
from shardwright.comm.losses import LossPoll, is_current, stamp, watched
from shardwright.comm.wire import Frame, Kind, Link, LinkError

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store

__all__ = [
    "ClosedAfterLossError",
    "Listener",
    "addresses",
    "connect",
    "listening_socket",
    "machine",
    "publish_loss",
    "read_loss",
    "wait_for_key",
]

_MAX_REFUSAL = 5.0  # seconds after which a rank that refuses connections counts as dead, without a watch
_SLICE = 0.5  # seconds per wait in torch's store, which can be interrupted neither by Ctrl-C nor by a loss


class ClosedAfterLossError(Exception):
    """The listener was closed because the ranks `ranks` were lost."""

    def __init__(self, why: str, ranks: tuple[int, ...]) -> None:
        super().__init__(why)
        self.ranks = ranks


@final
class Listener:
    """Accepts connections of the children in the tree; each must send the token published in the store."""

    def __init__(self, store: Store, key: str, expected: int) -> None:
        self.sock = listening_socket(backlog=expected + 16)
        self._token = secrets.token_bytes(16)
        self._unidentified: list[Link] = []
        port = self.sock.getsockname()[1]
        address = {"machine": machine(), "addresses": addresses(), "port": port, "token": self._token.hex()}
        store.set(key, json.dumps(address))

    @property
    def sockets(self) -> list[socket.socket]:
        """The sockets to poll for new connections and identifications."""
        return [self.sock, *(link.sock for link in self._unidentified)]

    def accept(self) -> dict[int, Link]:
        """Accept connections and return those that have identified themselves, by index."""
        while True:
            try:
                sock, _ = self.sock.accept()
            except BlockingIOError:
                break
            self._unidentified.append(Link(sock))
        identified = {}
        for link in list(self._unidentified):
            try:
                link.pull()
            except LinkError:
                # Closed before it identified itself: the round will report the rank as missing.
                self._reject(link)
                continue
            if not link.frames:
                continue
            hello = link.frames.popleft()
            if hello.kind == Kind.HELLO and hello.body[:16] == self._token:
                self._unidentified.remove(link)
                identified[struct.unpack("!I", hello.body[16:])[0]] = link
            else:
                self._reject(link)
        return identified

    def close(self) -> None:
        """Stop accepting connections."""
        self.sock.close()
        for link in list(self._unidentified):
            self._reject(link)

    def _reject(self, link: Link) -> None:
        self._unidentified.remove(link)
        link.close()


def connect(store: Store, key: str, index: int, owner: int, deadline: float) -> Link:
    """Connect to the listener that global rank `owner` publishes under `key`, and identify as `index`.

    Raise `TimeoutError` if it does not publish in time, `RankLostError` once the owner is known to be lost, and
    `ClosedAfterLossError` if it has closed its listener because others are.
    """
    tried: dict[str, Any] = {}
    since = time.monotonic()
    poll = LossPoll()
    while True:
        published = json.loads(wait_for_key(store, key, owner, deadline, poll))
        if published != tried:
            tried, since = published, time.monotonic()
        closed = _as_closed(published, owner)
        if closed is not None:
            raise closed
        if "lost" in published:  # of an earlier world with the same store: the owner has yet to open its listener
            loss = poll.lost([owner])
            if loss is not None:
                raise loss
            time.sleep(0.2)
            continue
        local = ["127.0.0.1"] if published["machine"] == machine() else []
        for address in [*local, *published["addresses"]]:
            left = deadline - time.monotonic()
            try:
                sock = socket.create_connection((address, published["port"]), timeout=max(0.1, min(left, 5.0)))
            except OSError:
                continue  # try the next address; the entry may also be from an earlier world
            link = Link(sock)
            link.send(Frame(Kind.HELLO, 0, bytes.fromhex(published["token"]) + struct.pack("!I", index)), 5.0)
            return link
        # A listener is opened before it is published: a closed one belongs to a rank that died, or to one that has
        # left the channel and will open it again. The watch can tell which.
        loss = poll.lost([owner])
        if loss is not None:
            raise loss
        if not watched() and time.monotonic() - since > _MAX_REFUSAL:
            raise LinkError(f"refuses connections on {published['addresses']}, port {published['port']}")
        time.sleep(0.02)


def publish_loss(store: Store, key: str, why: str, ranks: tuple[int, ...]) -> None:
    """Publish why the listener is closed, for ranks that try to connect later."""
    store.set(key, json.dumps({"lost": ranks, "why": why, "stamp": stamp()}))


def read_loss(store: Store, key: str, owner: int) -> ClosedAfterLossError | None:
    """Return why global rank `owner` has closed its listener, if it published that in this world."""
    return _as_closed(json.loads(store.get(key)), owner) if store.check([key]) else None


def _as_closed(published: dict[str, Any], owner: int) -> ClosedAfterLossError | None:
    if "lost" not in published or not is_current(owner, published["stamp"]):
        return None
    return ClosedAfterLossError(published["why"], tuple(published["lost"]))


def wait_for_key(store: Store, key: str, owner: int, deadline: float, poll: LossPoll) -> bytes:
    """Wait for global rank `owner` to write `key` in the store, and return the value.

    Raise `TimeoutError` at the deadline, and `RankLostError` once the owner is known to be lost.
    """
    while True:
        left = deadline - time.monotonic()
        if left <= 0:
            raise TimeoutError
        try:
            store.wait([key], timedelta(seconds=min(left, _SLICE)))
        except dist.DistStoreError:
            pass
        except RuntimeError as error:
            if "timeout" not in str(error).lower():  # as a FileStore reports it
                raise
        else:
            return store.get(key)
        loss = poll.lost([owner])
        if loss is not None and not store.check([key]):  # it may have written the key before it exited
            raise loss


def listening_socket(backlog: int) -> socket.socket:
    """Listen on a free port: of the interface GLOO_SOCKET_IFNAME if set, else of every interface."""
    chosen = _interface_address()
    if chosen is None and socket.has_dualstack_ipv6():
        sock = socket.create_server(("", 0), family=socket.AF_INET6, dualstack_ipv6=True, backlog=backlog)
    else:
        sock = socket.create_server((chosen or "", 0), backlog=backlog)
    sock.setblocking(False)
    close_in_children(sock)
    return sock


def addresses() -> list[str]:
    """Return the addresses of this machine for other machines, the most likely first."""
    chosen = _interface_address()
    if chosen is not None:
        return [chosen]
    own: list[str] = []
    if "MASTER_ADDR" in os.environ:
        own += _address_towards(os.environ["MASTER_ADDR"])
    try:
        own += [str(entry[4][0]) for entry in socket.getaddrinfo(socket.gethostname(), None, type=socket.SOCK_STREAM)]
    except socket.gaierror:
        own.append("127.0.0.1")  # a machine without a resolvable name can at least be reached from itself
    return list(dict.fromkeys(own))


def machine() -> str:
    """Identify the loopback interface: the boot id of this machine and the network namespace."""
    boot, namespace = Path("/proc/sys/kernel/random/boot_id"), Path("/proc/self/ns/net")
    if boot.exists() and namespace.exists():
        return f"{boot.read_text().strip()}/{namespace.stat().st_ino}"
    return socket.gethostname()


def _interface_address() -> str | None:
    name = os.environ.get("GLOO_SOCKET_IFNAME", "").partition(",")[0]  # gloo accepts a comma-separated list
    if not name:
        return None
    import fcntl  # not available on every system

    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        siocgifaddr = 0x8915
        try:
            answer = fcntl.ioctl(probe.fileno(), siocgifaddr, struct.pack("256s", name.encode()[:15]))
        except OSError:
            return None  # no IPv4 address: listen on every interface
    return socket.inet_ntoa(answer[20:24])


def _address_towards(host: str) -> list[str]:
    # Connecting a datagram socket sends nothing, but selects the interface.
    try:
        family, _, _, _, target = socket.getaddrinfo(host, 9, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.connect(target)
            return [str(probe.getsockname()[0])]
    except OSError:
        return []  # the master's name may not resolve here
