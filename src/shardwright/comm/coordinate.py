"""The control channel: small messages among the ranks of a group, over a separate tree of TCP connections.

It is independent of the training group: messages must get through, or their failure be explained, while that one hangs.
Ranks find each other through the store of the default process group. A round is an all-gather of bytes: up the tree,
then down. A parent watches the connection of each child, so a dead rank is detected by its neighbours, which notify the
rest. The timeout counts from the last arrival.
"""

from __future__ import annotations

import contextlib
import json
import socket
import struct
import threading
import time
from collections.abc import Iterable
from typing import final

import torch.distributed as dist

from shardwright.comm.group import ControlChannel, Group, world
from shardwright.comm.losses import LossPoll
from shardwright.comm.rendezvous import ClosedAfterLossError, Listener, connect, publish_loss, read_loss
from shardwright.comm.stores import STORE_SECONDS, within
from shardwright.comm.timeout import default_timeout
from shardwright.comm.wire import Frame, Kind, Link, LinkError, readable
from shardwright.errors import CommError, RankLostError

__all__ = ["Channel", "gather_bytes", "open_channel"]

_FANOUT = 32
# Seconds that each level of the tree waits longer than its children, so that the parent nearest a lost rank reports it.
_SLACK = 0.5
_ENTRY = struct.Struct("!IHQ")


def gather_bytes(
    payload: bytes, group: Group | None = None, *, what: str = "gather_bytes", timeout: float | None = None
) -> list[bytes]:
    """All-gather bytes: return those of every rank, in rank order; lengths may differ.

    `what` names the round: ranks that are in different ones all raise a `CommError` that says where each of them is.

    >>> gather_bytes(b"hello")
    [b'hello']
    """
    group = group or world()
    if group.size == 1 or group.simulated:
        return [payload] * group.size
    seconds = default_timeout() if timeout is None else timeout
    return open_channel(group, what=what, timeout=seconds).round(payload, what, seconds)


def open_channel(
    group: Group, *, what: str = "set-up", timeout: float | None = None, fanout: int = _FANOUT
) -> ControlChannel:
    """Return the group's channel, connected to this rank's neighbours; `fanout` is used only when it is created."""
    if group.channel is None:
        group.channel = Channel(group, fanout)
    group.channel.connect(what, default_timeout() if timeout is None else timeout)
    return group.channel


@final
class Channel:
    """This rank's links in the tree of a group: to its parent and to each child."""

    def __init__(self, group: Group, fanout: int) -> None:
        if group.process_group is None:
            raise CommError(f"{group!r} has no process group: a single rank needs no channel")
        me = group.rank
        self._group = group
        self._parent = None if me == 0 else (me - 1) // fanout
        self._children = range(me * fanout + 1, min(me * fanout + fanout + 1, group.size))
        self._height = _levels(me, fanout, group.size)
        self._levels_to_wait = _levels(0, fanout, group.size) + _depth(me, fanout)  # for an answer from the parent
        self._links: dict[int, Link] = {}
        self._round = 0
        self._lost: RankLostError | None = None
        self._lock = threading.Lock()
        self._store = dist.distributed_c10d._get_default_store()
        self._prefix = f"shardwright/coordinate/{group.process_group.group_name}"
        if group.name:
            self._prefix += f"/side/{group.name}"
        self._listener = Listener(self._store, f"{self._prefix}/{me}", len(self._children)) if self._children else None

    def connect(self, what: str, timeout: float) -> None:
        """Connect to the parent and the children, waiting for them to arrive."""
        with self._lock:
            self._refuse_after_loss(what)
            if self._parent is not None and self._parent not in self._links:
                self._connect_parent(self._parent, what, timeout)
            if self._listener is not None:
                self._accept_children(self._listener, what, timeout)

    def _connect_parent(self, parent: int, what: str, timeout: float) -> None:
        try:
            deadline = time.monotonic() + timeout
            key, owner = f"{self._prefix}/{parent}", self._group.ranks[parent]
            self._links[parent] = connect(self._store, key, self._group.rank, owner, deadline)
        except RankLostError as loss:
            raise self._lose([parent], what, loss) from None
        except ClosedAfterLossError as closed:
            raise self._spread(_about(str(closed), closed.ranks, what), parent) from None
        except TimeoutError:
            raise self._lose([parent], what, f"did not arrive within {timeout:g} s") from None
        except LinkError as error:
            raise self._lose([parent], what, str(error)) from error

    def _accept_children(self, listener: Listener, what: str, timeout: float) -> None:
        deadline = time.monotonic() + timeout + _SLACK * self._height
        poll = LossPoll()
        while missing := sorted(set(self._children) - self._links.keys()):
            if (left := deadline - time.monotonic()) <= 0:
                raise self._lose(missing, what, f"did not arrive within {timeout:g} s")
            ready = readable([*listener.sockets, *(link.sock for link in self._links.values())], min(left, _SLACK))
            self._pull(ready, what)
            # The death of a child that is not connected breaks no connection: query the watch.
            loss = None if ready else poll.lost([self._group.ranks[index] for index in missing])
            self._links.update(listener.accept())
            if loss is not None:
                gone = [self._group.ranks.index(rank) for rank in loss.ranks]
                raise self._lose(gone, what, loss)
            for source, link in self._links.items():
                for frame in link.frames:
                    if frame.kind == Kind.LOST:
                        raise self._spread(_loss_of(frame, what), source)
        listener.close()
        self._listener = None

    def round(self, payload: bytes, what: str, timeout: float) -> list[bytes]:
        """All-gather the payloads, in rank order."""
        with self._lock:
            self._refuse_after_loss(what)
            self._round += 1
            try:
                body = self._up_and_down(payload, what, timeout)
            except BaseException:
                if self._lost is None:  # interrupted: the others must not wait for the rest of the round
                    me = self._group.global_rank
                    self._spread(RankLostError(f"{what}: rank {me} was interrupted while it waited", (me,)), None)
                raise
        return _unpack(body, self._group)

    def _up_and_down(self, payload: bytes, what: str, timeout: float) -> bytes:
        self._announce(self._neighbours() if self._children else ())
        entries = {self._group.rank: _pack(self._group.rank, what, payload)}
        self._collect(entries, what, timeout)
        body = b"".join(entries[index] for index in sorted(entries))
        if self._parent is not None:
            body = self._ask_parent(self._parent, body, what, timeout)
        self._pass_down(body, timeout)
        return body

    def close(self) -> None:
        """Close all connections."""
        for link in self._links.values():
            link.close()
        if self._listener is not None:
            self._listener.close()
        self._lost = RankLostError("this channel was closed", ())

    def _collect(self, entries: dict[int, bytes], what: str, timeout: float) -> None:
        waiting = set(self._children)
        seconds = timeout + _SLACK * self._height
        deadline = time.monotonic() + seconds
        while waiting:
            source, frame = self._next_frame({*waiting, *self._above()}, deadline, what)
            if frame is None:
                raise self._lose(sorted(waiting), what, f"did not arrive within {timeout:g} s")
            if frame.kind == Kind.HERE:
                deadline = time.monotonic() + seconds
                self._relay(source)
            else:
                entries[source] = frame.body
                waiting.discard(source)

    def _ask_parent(self, parent: int, body: bytes, what: str, timeout: float) -> bytes:
        try:
            self._links[parent].send(Frame(Kind.UP, self._round, body), timeout)
        except LinkError as error:
            raise self._lose([parent], what, str(error)) from error
        seconds = timeout + _SLACK * self._levels_to_wait
        deadline = time.monotonic() + seconds
        while True:
            _, frame = self._next_frame({parent}, deadline, what)
            if frame is None:
                raise self._lose([parent], what, f"did not answer within {timeout:g} s")
            if frame.kind == Kind.DOWN:
                return frame.body
            deadline = time.monotonic() + seconds
            self._relay(parent)

    def _pass_down(self, body: bytes, timeout: float) -> None:
        for child in self._children:
            try:
                self._links[child].send(Frame(Kind.DOWN, self._round, body), timeout)
            except LinkError:
                continue  # this round is complete and others have its result; the next one will report the child

    def _next_frame(self, sources: set[int], deadline: float, what: str) -> tuple[int, Frame | None]:
        """Return the next frame of these neighbours and its source; the frame is None after the deadline."""
        while True:
            for source in sorted(sources):
                if self._links[source].frames:
                    # In order of arrival: a loss reported after an answer does not concern this round.
                    frame = self._links[source].frames.popleft()
                    if frame.kind == Kind.LOST:
                        raise self._spread(_loss_of(frame, what), source)
                    return source, frame
            if (left := deadline - time.monotonic()) <= 0:
                return -1, None
            self._pull(readable([self._links[source].sock for source in sources], left), what)

    def _pull(self, sockets: list[socket.socket], what: str) -> None:
        """Read from these sockets; raise if a neighbour has closed its connection."""
        for source, link in self._links.items():
            if link.sock in sockets:
                try:
                    link.pull()
                except LinkError as error:
                    raise self._lose([source], what, str(error)) from error

    def _above(self) -> list[int]:
        return [] if self._parent is None else [self._parent]

    def _neighbours(self) -> list[int]:
        return [*self._above(), *self._children]

    def _relay(self, source: int) -> None:
        # Forward the news of an arrival: from the parent to the children, from a child to the parent.
        self._announce(self._children if source == self._parent else self._above())

    def _announce(self, targets: Iterable[int]) -> None:
        self._send(Frame(Kind.HERE, self._round), targets)

    def _send(self, frame: Frame, targets: Iterable[int]) -> None:
        for target in targets:
            if target in self._links:
                # A neighbour that cannot be reached is dead, which the next read from it will show.
                with contextlib.suppress(LinkError):
                    self._links[target].send(frame, _SLACK)

    def _refuse_after_loss(self, what: str) -> None:
        if self._lost is not None:
            raise RankLostError(
                f"{what}: this group cannot continue after an earlier loss: {self._lost}", self._lost.ranks
            )

    def _lose(self, indices: list[int], what: str, why: str | RankLostError) -> RankLostError:
        """Build the RankLostError for lost neighbours, after notifying the rest; prefer the reason they sent.

        `why` describes what happened to them, or is an error that names them.
        """
        for index in indices:
            if index in self._links:
                with contextlib.suppress(LinkError):
                    self._links[index].pull()
                for frame in self._links[index].frames:
                    if frame.kind == Kind.LOST:
                        return self._spread(_loss_of(frame, what), index)
        if self._parent is not None and self._parent in indices:
            # It may have closed its socket before it could send the reason.
            key, owner = f"{self._prefix}/{self._parent}", self._group.ranks[self._parent]
            closed = within(STORE_SECONDS, lambda: read_loss(self._store, key, owner))
            if closed is not None:
                return self._spread(_about(str(closed), closed.ranks, what), self._parent)
        if isinstance(why, RankLostError):
            return self._spread(_about(str(why), why.ranks, what), None)
        ranks = tuple(self._group.ranks[index] for index in indices)
        named = f"rank{'s' * (len(ranks) > 1)} {', '.join(map(str, ranks))}"
        return self._spread(RankLostError(f"{what}: {named} {why}", ranks), None)

    def _spread(self, loss: RankLostError, source: int | None) -> RankLostError:
        self._lost = loss
        if self._listener is not None:
            self._links.update(self._listener.accept())
            key = f"{self._prefix}/{self._group.rank}"
            within(STORE_SECONDS, lambda: publish_loss(self._store, key, str(loss), loss.ranks))
            self._listener.close()
            self._listener = None
        body = json.dumps({"ranks": loss.ranks, "why": str(loss)}).encode()
        self._send(Frame(Kind.LOST, self._round, body), [index for index in self._neighbours() if index != source])
        return loss


def _loss_of(frame: Frame, what: str) -> RankLostError:
    body = json.loads(frame.body)
    return _about(body["why"], tuple(body["ranks"]), what)


def _about(why: str, ranks: tuple[int, ...], what: str) -> RankLostError:
    return RankLostError(why if why.startswith(f"{what}: ") else f"{what}: {why}", ranks)


def _levels(index: int, fanout: int, size: int) -> int:
    """Return the number of levels of the tree below a rank.

    >>> [_levels(index, 2, 7) for index in (0, 1, 3)]
    [2, 1, 0]
    """
    first = index * fanout + 1
    return 0 if first >= size else 1 + _levels(first, fanout, size)


def _depth(index: int, fanout: int) -> int:
    """Return the number of levels of the tree above a rank.

    >>> [_depth(index, 2) for index in (0, 1, 3)]
    [0, 1, 2]
    """
    return 0 if index == 0 else 1 + _depth((index - 1) // fanout, fanout)


def _pack(index: int, what: str, payload: bytes) -> bytes:
    name = what.encode()
    return _ENTRY.pack(index, len(name), len(payload)) + name + payload


def _unpack(body: bytes, group: Group) -> list[bytes]:
    payloads = [b""] * group.size
    names = [b""] * group.size
    at = 0
    while at < len(body):
        index, name, length = _ENTRY.unpack_from(body, at)
        at += _ENTRY.size
        names[index] = body[at : at + name]
        payloads[index] = body[at + name : at + name + length]
        at += name + length
    for index, name in enumerate(names):
        if name != names[0]:
            raise CommError(
                f"ranks run different programs: rank {group.ranks[0]} is in {names[0].decode()!r}, "
                f"rank {group.ranks[index]} in {name.decode()!r}"
            )
    return payloads
