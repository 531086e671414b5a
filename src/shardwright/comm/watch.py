"""Diagnose a collective that does not complete: which rank it waits for, and where that rank is.

A thread checks every second whether this process waits in a collective. After two seconds it queries the rank that is
waited for, repeatedly. It aborts the wait when the reason is certain: the process of that rank has exited, its host has
been unreachable for the timeout, it is in another collective at the same point of the program, or it waits for this
rank itself, directly or through others. A rank that computes is waited for; the error of a timeout says where it is.
"""

from __future__ import annotations

import json
import os
import secrets
import threading
import time
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any, NamedTuple, final

import torch.distributed as dist

from shardwright.comm.beacon import Beacon, Reply, State
from shardwright.comm.exit import abort_group, exiting
from shardwright.comm.group import Group, known_groups, on_enter, on_forget
from shardwright.comm.losses import set_detector
from shardwright.comm.peers import ANSWER_SECONDS, Peers, beacon_key, names
from shardwright.comm.stores import STORE_SECONDS, within
from shardwright.comm.timeout import default_timeout
from shardwright.comm.waits import Waiting, line_of, main_line, threads, waiting
from shardwright.errors import CommError, ProgramMismatchError, RankLostError

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store

    from shardwright.comm.ledger import Entry

__all__ = ["ask_why", "where"]

_TICK = 1.0  # seconds between two checks
_GRACE = 2.0  # seconds of waiting before other ranks are queried
_PAUSE = 2.0  # seconds between two queries, growing to _MAX_PAUSE
_MAX_PAUSE = 10.0
_CONNECT_SECONDS = 1.0  # timeout for a connection, which shows that a process is alive
_TRIES = 3  # queries after a failure
_VERDICT = "shardwright/verdict"  # in the store
_MAX_QUERIED = 32  # ranks queried at once, if it is unknown which one this rank waits for


class _Wait(NamedTuple):
    """The description of a wait that is sent to other ranks."""

    rank: int
    group: str
    ranks: tuple[int, ...]
    kind: str
    number: int | None  # of the collective; None for a message between two ranks
    details: str
    peer: int | None  # global rank; None if the backend does not tell
    nth: int | None  # of the message
    nbytes: int
    incoming: bool
    line: str
    key: int  # identifies the wait

    def text(self) -> str:
        where = f" at {self.line}" if self.line else ""
        number = "" if self.number is None else f" number {self.number}"
        to = "" if self.peer is None else f", waiting for rank {self.peer}"
        return f"rank {self.rank}: {self.kind}{number} over ranks {list(self.ranks)}{self.details}{where}{to}"


@final
class Watch:
    """Watches the waits of this process in one world."""

    def __init__(self, everyone: Group, store: Store) -> None:
        self.rank = everyone.global_rank
        self.verdict: CommError | None = None
        self._store = store
        self._earlier_verdict = ""
        self._process_group = everyone.process_group
        self._earlier_verdict = self._read_verdict()  # of an earlier world with the same store
        self._peers = Peers(store, self.rank)
        self.stamp = secrets.token_hex(16)
        self._beacon = Beacon(store, beacon_key(self.rank), self._describe, self.stamp)
        self._seen: dict[int, tuple[int, float, float, float]] = {}  # by thread: wait, since, next query, pause
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="shardwright watch", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Stop watching and answering; publish whether the process exits."""
        self._stop.set()
        note = {"ended": exiting.is_set(), "token": self.stamp}
        within(STORE_SECONDS, lambda: self._store.set(beacon_key(self.rank), json.dumps(note)))
        self._beacon.close()
        if threading.current_thread() is not self._thread:
            self._thread.join(ANSWER_SECONDS)

    def why(self, group: Group, peer: int | None) -> CommError | None:
        """Return why a collective has failed on this rank, if any rank knows."""
        others = [group.ranks[peer]] if peer is not None else []
        others += [rank for rank in group.ranks if rank != self.rank and rank not in others]
        for _ in range(_TRIES):
            if self.verdict is not None:
                break
            replies = self._peers.ask(others[:_MAX_QUERIED])
            self._adopt(replies.values())
            # A third rank that exited normally is not the reason of the failure.
            ended = self._peers.ended(replies, finished=replies if peer is None else (others[0],))
            if self.verdict is None and ended:
                self._settle(RankLostError(self._peers.ended_text(ended), ended))
            elif all(reply.state is not State.SILENT for reply in replies.values()):
                break  # else one of them may be about to exit
        return self.verdict

    def lost_among(self, ranks: Iterable[int]) -> RankLostError | None:
        """Return an error that names the given global ranks that are certainly lost, or None.

        For code that waits for them to arrive: a rank that exited normally will not arrive either.
        """
        replies = self._peers.ask(list(ranks)[:_MAX_QUERIED], timeout=_CONNECT_SECONDS)
        ended = self._peers.ended(replies, finished=replies)
        if ended:
            return RankLostError(self._peers.ended_text(ended), ended)
        lost = self._peers.lost_for_long(replies)
        return RankLostError(_unreachable_text(lost), lost) if lost else None

    def is_current(self, rank: int, stamp: str) -> bool:
        """True if a rank's entry in the store with this stamp belongs to its current world."""
        reply = self._peers.ask([rank], timeout=_CONNECT_SECONDS)[rank]
        if reply.state is State.ENDED:
            return self._peers.token(rank) == stamp
        return reply.state is State.ANSWERED and reply.body["stamp"] == stamp

    def where(self, group: Group) -> str:
        """Describe where the other ranks of a group are."""
        others = [rank for rank in group.ranks if rank != self.rank][:_MAX_QUERIED]
        return "".join(f"\n  {_status_text(rank, reply)}" for rank, reply in sorted(self._peers.ask(others).items()))

    # Replies to queries

    def _describe(self, asker: int) -> dict[str, Any]:
        # If torch's process group was replaced, this watch does not know yet that its world has ended.
        here = dist.is_initialized() and dist.group.WORLD is self._process_group
        groups = {}
        for group in known_groups() if here else ():
            if asker in group.ranks and group.process_group is not None:
                index, ledger = group.ranks.index(asker), group.ledger
                groups[_name(group)] = {
                    "count": ledger.count,
                    "recent": [[e.number, e.kind, str(e.details), e.sent.get(index)] for e in list(ledger.recent)],
                    "sent": ledger.sent.get(index, 0),
                    "received": ledger.received.get(index, 0),
                    "messages": [[nth, size] for peer, nth, size in list(ledger.messages) if peer == index],
                }
        return {
            "stamp": self.stamp if here else "",
            "line": main_line(),
            "threads": len(threads),
            "groups": groups,
            "waits": [self._wait(thread, pending) for thread, pending in list(waiting.items())],
            "verdict": _as_note(self.verdict) if here and self.verdict is not None else None,
        }

    def _wait(self, thread: int, pending: Waiting) -> _Wait:
        group = pending.group
        flight = pending.at
        entry = _entry(group, pending.number)
        return _Wait(
            self.rank,
            _name(group),
            group.ranks,
            pending.kind,
            pending.number,
            "" if entry is None else f" {entry.details}",
            None if flight is None or flight.peer is None else group.ranks[flight.peer],
            None if flight is None else flight.number,
            0 if flight is None else flight.nbytes,
            flight is None or flight.incoming,
            line_of(thread),
            id(pending),
        )

    # The watching thread

    def _run(self) -> None:
        while not self._stop.wait(_TICK):
            self._look()

    def _look(self) -> None:
        """Look at all waits once; a method of its own, so that no result stays alive until the next time."""
        self._peers.probe_neighbours(known_groups())
        for thread, pending in list(waiting.items()):
            self._check(thread, pending)
        for thread in self._seen.keys() - waiting.keys():
            del self._seen[thread]

    def _check(self, thread: int, pending: Waiting) -> None:
        now = time.monotonic()
        key, since, due, pause = self._seen.get(thread, (0, 0.0, 0.0, 0.0))
        if key != id(pending.at):
            self._seen[thread] = (id(pending.at), now, now + _GRACE - _TICK, _PAUSE)
            return
        if now < due:
            return
        verdict = self.verdict or self._inquire(self._wait(thread, pending))
        self._seen[thread] = (key, since, time.monotonic() + pause, min(2 * pause, _MAX_PAUSE))
        if verdict is not None and waiting.get(thread) is pending:
            self._settle(verdict)
            for group in known_groups():
                if group.process_group is not None:
                    abort_group(group.process_group)

    def _inquire(self, wait: _Wait) -> CommError | None:
        """Return why the wait can never end, if that is certain."""
        asked = [wait.peer] if wait.peer is not None else [rank for rank in wait.ranks if rank != self.rank]
        replies = self._peers.ask(asked[:_MAX_QUERIED])
        self._adopt(replies.values())
        if self.verdict is not None:
            return self.verdict
        lost = self._peers.lost_for_long(replies)
        if lost:
            return RankLostError(_unreachable_text(lost), lost)
        # A native collective does not tell which rank it waits for: one that exited may have done its part before.
        ended = self._peers.ended(replies, finished=() if wait.peer is None else (wait.peer,))
        if ended:
            # Its messages may still be on their way: it is certain if this rank still waits after a while.
            if self._stop.wait(_GRACE) or not self._still(wait):
                return None
            return RankLostError(self._peers.ended_text(ended), ended)
        first = self._chain(wait)
        if isinstance(first, CommError) or first is None:
            return first
        if self._stop.wait(_TICK) or not self._still(wait) or self._chain(wait) != first:
            return None
        return _mismatch(first)

    def _still(self, wait: _Wait) -> bool:
        return any(id(p) == wait.key and self._wait(t, p).nth == wait.nth for t, p in list(waiting.items()))

    def _chain(self, wait: _Wait) -> CommError | list[_Wait] | None:
        """Follow the chain of waits; return a cycle that includes this rank, or an error found on the way."""
        chain = [wait]
        while (peer := chain[-1].peer) is not None:
            last = chain[-1]
            body = self._describe(last.rank) if peer == self.rank else self._peers.ask([peer], last.rank)[peer].body
            if not body or body["threads"] > 1:
                return None  # another thread may get there
            there = body["groups"].get(last.group)
            if there is None:
                return None
            difference = _difference(last, there)
            if difference:
                other = [_Wait(*w) for w in body["waits"]]
                named = other[0].text() if other else f"rank {peer}: at {body['line'] or 'an unknown line'}"
                return ProgramMismatchError(_different(f"{last.text()}\n  {named} ({difference})"))
            if not _not_started(last, there):
                return None  # it has started the operation: the message is on its way
            if peer == self.rank:
                return chain if len(chain) > 1 else None
            waits = [_Wait(*w) for w in body["waits"]]
            if len(waits) != 1 or any(w.rank == waits[0].rank for w in chain):
                return None  # it computes; or a cycle without this rank, whose members will find it
            chain.append(waits[0]._replace(ranks=tuple(waits[0].ranks)))
        return None

    # Verdicts

    def _adopt(self, replies: Iterable[Reply]) -> None:
        """Adopt the verdict of another rank, if there is one."""
        notes = [reply.body["verdict"] for reply in replies if reply.body.get("verdict")]
        if not notes:
            noted = self._read_verdict()
            notes = [json.loads(noted)] if noted != self._earlier_verdict else []
        if notes and self.verdict is None:
            self.verdict = _from_note(notes[0])

    def _settle(self, verdict: CommError) -> None:
        """Record why this world cannot continue, and publish it."""
        if self.verdict is None:
            self.verdict = verdict
            note = json.dumps(_as_note(verdict) | {"stamp": self.stamp})  # unique to this world
            within(STORE_SECONDS, lambda: self._store.compare_set(_VERDICT, self._earlier_verdict, note))

    def _read_verdict(self) -> str:
        noted: bytes | None = within(
            STORE_SECONDS, lambda: self._store.get(_VERDICT) if self._store.check([_VERDICT]) else b""
        )
        return self._earlier_verdict if noted is None else noted.decode()


def _name(group: Group) -> str:
    return "" if group.process_group is None else str(group.process_group.group_name)


def _entry(group: Group, number: int | None) -> Entry | None:
    return next((entry for entry in list(group.ledger.recent) if entry.number == number), None)


def _difference(wait: _Wait, there: dict[str, Any]) -> str:
    """Describe how a rank's operation differs from the one that another waits for; "" if it does not."""
    if wait.number is not None and wait.details:
        for number, kind, details, sent in there["recent"]:
            if number != wait.number:
                continue
            if kind != wait.kind or f" {details}" != wait.details:
                return f"its collective number {number} of these ranks is {kind} {details}"
            if wait.incoming and wait.peer is not None and sent is not None and sent != wait.nbytes:
                return f"it sends {sent} bytes, where {wait.nbytes} are expected"
    elif wait.number is None and wait.incoming:
        for nth, size in there["messages"]:
            if nth == wait.nth and size != wait.nbytes:
                return (
                    f"its message number {nth} to rank {wait.rank} has {size} bytes, where {wait.nbytes} are expected"
                )
    return ""


def _not_started(wait: _Wait, there: dict[str, Any]) -> bool:
    """True if a rank has not yet started the operation that another waits for."""
    if wait.number is not None:
        return bool(there["count"] < wait.number)
    return bool(there["sent" if wait.incoming else "received"] < (wait.nth or 0))


def _mismatch(chain: list[_Wait]) -> ProgramMismatchError:
    return ProgramMismatchError(_different("\n  ".join(wait.text() for wait in sorted(chain))))


def _different(who: str) -> str:
    return (
        f"the ranks run different programs and wait for each other:\n  {who}\n"
        "all ranks of a group must call the same collectives in the same order: look for a call that only some of them "
        "make, such as `if rank == 0: print(loss.item())`"
    )


def _unreachable_text(ranks: tuple[int, ...]) -> str:
    return f"{names(ranks)} could not be reached for {default_timeout():g} s: the host or its network is down"


def _as_note(verdict: CommError) -> dict[str, Any]:
    return {"text": str(verdict), "ranks": list(verdict.ranks) if isinstance(verdict, RankLostError) else None}


def _from_note(note: dict[str, Any]) -> CommError:
    if note["ranks"] is None:
        return ProgramMismatchError(note["text"])
    return RankLostError(note["text"], tuple(note["ranks"]))


def _status_text(rank: int, reply: Reply) -> str:
    if reply.state is not State.ANSWERED:
        return f"rank {rank}: {reply.state.value}"
    if reply.body["waits"]:
        return _Wait(*reply.body["waits"][0]).text()
    last = [f"{kind} number {number}" for g in reply.body["groups"].values() for number, kind, *_ in g["recent"][-1:]]
    before = f"; the last collective it started is {', '.join(last)}" if last else ""
    return f"rank {rank}: computing, at {reply.body['line'] or 'an unknown line'}{before}"


_current: Watch | None = None


def ask_why(group: Group, peer: int | None) -> CommError | None:
    """Return why a collective has failed, if known. `peer` is the index of the rank it failed with."""
    return None if _current is None else _current.why(group, peer)


def where(group: Group) -> str:
    """Describe where the other ranks of a group are, one line each."""
    return "" if _current is None else _current.where(group)


def _enter(everyone: Group) -> None:
    global _current
    if everyone.size == 1:
        return
    try:
        # A separate connection: another thread may be waiting in the one that torch uses.
        store = dist.distributed_c10d._get_default_store().clone()  # type: ignore[attr-defined]  # torch's stub lacks it
    except RuntimeError:
        return  # a store written in Python, or torch's fake store: it cannot be cloned
    _current = Watch(everyone, store)
    set_detector(_current)


def _forget() -> None:
    global _current
    before, _current = _current, None
    set_detector(None)
    if before is not None:
        before.close()


def _in_a_child() -> None:
    global _current
    _current = None
    set_detector(None)


os.register_at_fork(after_in_child=_in_a_child)
on_enter(_enter)
on_forget(_forget)
