"""What is known of the processes of the other ranks, by asking their beacons.

A beacon that has never been reached from here proves nothing: a firewall may drop or refuse connections between two
hosts whose ranks communicate well by other ports or another network. So of a rank on a host that no connection was ever
made to, neither a refusal nor silence counts. A few ranks of each group are asked early, to learn which hosts can be.
"""

from __future__ import annotations

import json
import time
from collections.abc import Container, Iterable
from typing import TYPE_CHECKING, Any, final

from shardwright.comm.beacon import Reply, State, ask
from shardwright.comm.group import Group
from shardwright.comm.rendezvous import machine
from shardwright.comm.stores import STORE_SECONDS, within
from shardwright.comm.timeout import default_timeout

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store

__all__ = ["ANSWER", "Peers", "beacon_key", "names"]

ANSWER = 3.0  # seconds for an answer
_FORGOTTEN = 60.0  # seconds without a question after which an earlier failure to reach a rank no longer counts
_NEIGHBOURS = 4  # ranks of each group that are asked early: those that follow this one
_LATEST = 60.0  # seconds between two attempts to do so; the first come after 1, 2, 4, ...


@final
class Peers:
    """The other ranks, as seen from one."""

    def __init__(self, store: Store, rank: int) -> None:
        self._store = store
        self._rank = rank
        self._places: dict[int, dict[str, Any]] = {}
        self._unreachable: dict[int, tuple[float, float]] = {}  # since when, and when it was last asked
        self._reached = {machine()}  # hosts that a connection was made to
        self._met: set[int] = set()
        self._pause, self._due = 1.0, 0.0

    def ask(self, ranks: Iterable[int], asker: int | None = None, timeout: float = ANSWER) -> dict[int, Reply]:
        """Ask ranks where they are, on behalf of this one or of another; wait at most `timeout` seconds."""
        ranks = list(ranks)
        self._find([rank for rank in ranks if not self._is_placed(rank)])
        known = {rank: place for rank in ranks if "port" in (place := self._places.get(rank, {}))}
        found = ask(known, self._rank if asker is None else asker, timeout)
        for rank, reply in found.items():
            if reply.state in (State.HERE, State.SILENT):
                self._reached.add(known[rank]["machine"])
        refused = [rank for rank, reply in found.items() if reply.state is State.ENDED]
        if refused:
            # It may have opened another door since, or closed this one without ending.
            self._find(refused)
            for rank in refused:
                now = self._places[rank]
                if now != known[rank] and not now.get("ended"):
                    found[rank] = Reply(State.UNKNOWN, {})
        for rank in ranks:
            if rank not in found:
                gone = self._places.get(rank, {}).get("ended", False)
                found[rank] = Reply(State.ENDED if gone else State.UNKNOWN, {})
        return found

    def meet(self, groups: Iterable[Group]) -> None:
        """Ask the ranks that follow this one in these groups, once each, if it is time to."""
        now = time.monotonic()
        if now < self._due:
            return
        near = {group.ranks[(group.rank + n) % group.size] for group in groups for n in range(1, _NEIGHBOURS + 1)}
        strangers = sorted(near - self._met - {self._rank})
        if strangers:
            self._find([rank for rank in strangers if not self._is_placed(rank)])
            hosts = {rank: self._places[rank].get("machine") for rank in strangers if rank in self._places}
            self.ask(rank for rank, host in hosts.items() if host not in self._reached)
            self._met |= {rank for rank, host in hosts.items() if host in self._reached}
            self._pause = min(2 * self._pause, _LATEST)
        self._due = now + self._pause

    def token(self, rank: int) -> str:
        """Return the token of the beacon that a rank has, or had last; "" if it is not known."""
        found: str = self._places.get(rank, {}).get("token", "")
        return found

    def lost_for_long(self, found: dict[int, Reply]) -> tuple[int, ...]:
        """Return those of the ranks just asked that could not be reached for the timeout, whenever they were asked."""
        now = time.monotonic()
        lost = []
        for rank, reply in found.items():
            if reply.state is not State.UNREACHABLE or not self._reachable(rank):
                self._unreachable.pop(rank, None)
                continue
            since, asked = self._unreachable.get(rank, (now - ANSWER, now))
            if now - asked > _FORGOTTEN:
                since = now - ANSWER  # nobody has asked in between: it may have been there
            self._unreachable[rank] = (since, now)
            if now - since > default_timeout():
                lost.append(rank)
        return tuple(sorted(lost))

    def ended(self, found: dict[int, Reply], finished: Container[int]) -> tuple[int, ...]:
        """Return the ranks that have ended; those that ended in good order only if they are in `finished`."""
        gone = [rank for rank, reply in found.items() if reply.state is State.ENDED]
        in_order = {rank for rank in gone if self._places.get(rank, {}).get("ended")}
        return tuple(sorted(rank for rank in gone if (rank in finished if rank in in_order else self._reachable(rank))))

    def ended_text(self, ranks: tuple[int, ...]) -> str:
        """Return a sentence that says that these ranks have ended, and how."""
        finished = [rank for rank in ranks if self._places.get(rank, {}).get("ended")]
        how = "has come to its end" if finished else "has ended: it was killed, or has left without a word"
        if len(ranks) > 1:
            how = how.replace("has", "have", 1).replace("its end", "their ends")
        return f"{names(ranks)} {how}"

    def _reachable(self, rank: int) -> bool:
        """Return whether a connection was ever made to the rank's host: only then does a failure tell anything."""
        return self._places.get(rank, {}).get("machine") in self._reached

    def _is_placed(self, rank: int) -> bool:
        """Return whether it is known where to ask the rank, or that it has ended; one that has left may come back."""
        place = self._places.get(rank, {})
        return "port" in place or bool(place.get("ended"))

    def _find(self, ranks: list[int]) -> None:
        """Read from the store where ranks can be asked."""

        def read() -> list[tuple[int, bytes]]:
            keys = [(rank, beacon_key(rank)) for rank in ranks]
            return [(rank, self._store.get(key)) for rank, key in keys if self._store.check([key])]

        for rank, note in within(STORE_SECONDS, read) or ():
            self._places[rank] = json.loads(note)


def beacon_key(rank: int) -> str:
    """Return the key in the store under which a rank says where it can be asked.

    >>> beacon_key(3)
    'shardwright/beacon/3'
    """
    return f"shardwright/beacon/{rank}"


def names(ranks: tuple[int, ...]) -> str:
    """Return these ranks in words.

    >>> names((1, 2))
    'ranks 1, 2'
    """
    return f"rank{'s' * (len(ranks) > 1)} {', '.join(map(str, ranks))}"
