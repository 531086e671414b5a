"""How one rank finds another: a door it opens, and its whereabouts written in the store."""

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
from shardwright.comm.losses import Inquiry, stamp, still_stands, watched
from shardwright.comm.wire import Frame, Kind, Link, LinkError

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store

__all__ = ["Door", "LostNoteError", "addresses", "await_key", "leave_note", "listener", "machine", "reach", "read_note"]

_REFUSAL = 5.0  # seconds until a door that stays shut counts as a death, where nobody watches
_SLICE = 0.5  # seconds in torch's store at a time: it hears neither Ctrl-C nor of losses


class LostNoteError(Exception):
    """The door sought was closed because ranks were lost; `ranks` names them."""

    def __init__(self, why: str, ranks: tuple[int, ...]) -> None:
        super().__init__(why)
        self.ranks = ranks


@final
class Door:
    """Where children of the tree come in: each must know the token that stands in the store."""

    def __init__(self, store: Store, key: str, expected: int) -> None:
        self.sock = listener(backlog=expected + 16)
        self._token = secrets.token_bytes(16)
        self._strangers: list[Link] = []
        port = self.sock.getsockname()[1]
        whereabouts = {"machine": machine(), "addresses": addresses(), "port": port, "token": self._token.hex()}
        store.set(key, json.dumps(whereabouts))

    @property
    def sockets(self) -> list[socket.socket]:
        """What to watch for news at the door."""
        return [self.sock, *(link.sock for link in self._strangers)]

    def admit(self) -> dict[int, Link]:
        """Those who have come in and said who they are, by index."""
        while True:
            try:
                sock, _ = self.sock.accept()
            except BlockingIOError:
                break
            self._strangers.append(Link(sock))
        guests = {}
        for link in list(self._strangers):
            try:
                link.pull()
            except LinkError:
                # Gone before saying who it was: it is missed, and named, by the round.
                self._dismiss(link)
                continue
            if not link.frames:
                continue
            hello = link.frames.popleft()
            if hello.kind == Kind.HELLO and hello.body[:16] == self._token:
                self._strangers.remove(link)
                guests[struct.unpack("!I", hello.body[16:])[0]] = link
            else:
                self._dismiss(link)
        return guests

    def close(self) -> None:
        """Lets nobody in any more."""
        self.sock.close()
        for link in list(self._strangers):
            self._dismiss(link)

    def _dismiss(self, link: Link) -> None:
        self._strangers.remove(link)
        link.close()


def reach(store: Store, key: str, index: int, owner: int, deadline: float) -> Link:
    """Return a link through the door under `key`, which global rank `owner` opens, introduced as `index`.

    Raise `TimeoutError` if nobody opens in time, `RankLostError` once it is known that the owner is lost, and
    `LostNoteError` if it has closed the door because others are.
    """
    tried: dict[str, Any] = {}
    since = time.monotonic()
    inquiry = Inquiry()
    while True:
        whereabouts = json.loads(await_key(store, key, owner, deadline, inquiry))
        if whereabouts != tried:
            tried, since = whereabouts, time.monotonic()
        note = _as_note(whereabouts, owner)
        if note is not None:
            raise note
        if "lost" in whereabouts:  # in an earlier world that had the same store: the owner has yet to open its door
            loss = inquiry.lost([owner])
            if loss is not None:
                raise loss
            time.sleep(0.2)
            continue
        near = ["127.0.0.1"] if whereabouts["machine"] == machine() else []
        for address in [*near, *whereabouts["addresses"]]:
            left = deadline - time.monotonic()
            try:
                sock = socket.create_connection((address, whereabouts["port"]), timeout=max(0.1, min(left, 5.0)))
            except OSError:
                continue  # perhaps another address, perhaps the note of an earlier world: look again
            link = Link(sock)
            link.send(Frame(Kind.HELLO, 0, bytes.fromhex(whereabouts["token"]) + struct.pack("!I", index)), 5.0)
            return link
        # A door is open before it is announced: one that is shut belongs to a rank that died, or to one that has left
        # the channel and will open it again. The watch tells them apart.
        loss = inquiry.lost([owner])
        if loss is not None:
            raise loss
        if not watched() and time.monotonic() - since > _REFUSAL:
            raise LinkError(f"refuses connections on {whereabouts['addresses']}, port {whereabouts['port']}")
        time.sleep(0.02)


def leave_note(store: Store, key: str, why: str, ranks: tuple[int, ...]) -> None:
    """Tell those who come to the door later why it is closed."""
    store.set(key, json.dumps({"lost": ranks, "why": why, "stamp": stamp()}))


def read_note(store: Store, key: str, owner: int) -> LostNoteError | None:
    """Return why global rank `owner` has closed the door under `key`, if a note of this world says so."""
    return _as_note(json.loads(store.get(key)), owner) if store.check([key]) else None


def _as_note(found: dict[str, Any], owner: int) -> LostNoteError | None:
    if "lost" not in found or not still_stands(owner, found["stamp"]):
        return None
    return LostNoteError(found["why"], tuple(found["lost"]))


def await_key(store: Store, key: str, owner: int, deadline: float, inquiry: Inquiry) -> bytes:
    """Return what global rank `owner` writes in the store under `key`, once it has.

    Raise `TimeoutError` at the deadline, and `RankLostError` once it is known that the owner is lost.
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
            if "timeout" not in str(error).lower():  # how a FileStore says it
                raise
        else:
            return store.get(key)
        loss = inquiry.lost([owner])
        if loss is not None and not store.check([key]):  # it may have written it, and then ended
            raise loss


def listener(backlog: int) -> socket.socket:
    """A socket that takes connections on a free port: of GLOO_SOCKET_IFNAME if set, else of every interface."""
    chosen = _interface_address()
    if chosen is None and socket.has_dualstack_ipv6():
        sock = socket.create_server(("", 0), family=socket.AF_INET6, dualstack_ipv6=True, backlog=backlog)
    else:
        sock = socket.create_server((chosen or "", 0), backlog=backlog)
    sock.setblocking(False)
    close_in_children(sock)
    return sock


def addresses() -> list[str]:
    """Under which addresses other machines may reach this one, the likeliest first."""
    chosen = _interface_address()
    if chosen is not None:
        return [chosen]
    found: list[str] = []
    if "MASTER_ADDR" in os.environ:
        found += _address_towards(os.environ["MASTER_ADDR"])
    try:
        found += [str(entry[4][0]) for entry in socket.getaddrinfo(socket.gethostname(), None, type=socket.SOCK_STREAM)]
    except socket.gaierror:
        found.append("127.0.0.1")  # a machine without a name can be reached from itself at least
    return list(dict.fromkeys(found))


def machine() -> str:
    """Names what shares a loopback interface: this boot of this machine, and the network namespace in it."""
    boot, namespace = Path("/proc/sys/kernel/random/boot_id"), Path("/proc/self/ns/net")
    if boot.exists() and namespace.exists():
        return f"{boot.read_text().strip()}/{namespace.stat().st_ino}"
    return socket.gethostname()


def _interface_address() -> str | None:
    name = os.environ.get("GLOO_SOCKET_IFNAME", "").partition(",")[0]  # gloo takes several, separated by commas
    if not name:
        return None
    import fcntl  # only here: not on every system

    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        siocgifaddr = 0x8915
        try:
            answer = fcntl.ioctl(probe.fileno(), siocgifaddr, struct.pack("256s", name.encode()[:15]))
        except OSError:
            return None  # it has no IPv4 address: be reached on every interface
    return socket.inet_ntoa(answer[20:24])


def _address_towards(host: str) -> list[str]:
    # Connecting a datagram socket sends nothing, but makes the system choose the interface.
    try:
        family, _, _, _, target = socket.getaddrinfo(host, 9, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.connect(target)
            return [str(probe.getsockname()[0])]
    except OSError:
        return []  # the master's name may mean nothing here: there are other ways
