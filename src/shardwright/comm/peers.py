"""The state of the processes of other ranks, obtained by querying their beacons.

A beacon that was never reached from here proves nothing: a firewall may drop or refuse connections between two hosts
whose ranks communicate over other ports or another network. So for a host to which no connection was ever made, neither
a refusal nor silence counts. A few ranks of each group are queried early, to learn which hosts can be reached.
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

__all__ = ["ANSWER_SECONDS", "Peers", "beacon_key", "names"]

ANSWER_SECONDS = 3.0  # timeout in seconds for a reply
_FAILURE_EXPIRES = 60.0  # seconds without a query after which an earlier failure to reach a rank is ignored
_NEIGHBOURS = 4  # ranks of each group that are queried early: those after this one
_MAX_PAUSE = 60.0  # seconds between two such attempts; the first come after 1, 2, 4, ...


@final
class Peers:
    """The other ranks, as seen from this one."""

    def __init__(self, store: Store, rank: int) -> None:
        self._store = store
        self._rank = rank
        self._endpoints: dict[int, dict[str, Any]] = {}
        self._unreachable: dict[int, tuple[float, float]] = {}  # since when, and time of the last query
        self._reached = {machine()}  # hosts to which a connection was made
        self._probed: set[int] = set()
        self._pause, self._due = 1.0, 0.0

    def ask(self, ranks: Iterable[int], asker: int | None = None, timeout: float = ANSWER_SECONDS) -> dict[int, Reply]:
        """Query the state of ranks, on behalf of this rank or of `asker`, for at most `timeout` seconds."""
        ranks = list(ranks)
        self._look_up([rank for rank in ranks if not self._is_known(rank)])
        known = {rank: endpoint for rank in ranks if "port" in (endpoint := self._endpoints.get(rank, {}))}
        replies = ask(known, self._rank if asker is None else asker, timeout)
        for rank, reply in replies.items():
            if reply.state in (State.ANSWERED, State.SILENT):
                self._reached.add(known[rank]["machine"])
        refused = [rank for rank, reply in replies.items() if reply.state is State.ENDED]
        if refused:
            # It may have opened another socket since, or closed this one without exiting.
            self._look_up(refused)
            for rank in refused:
                endpoint = self._endpoints[rank]
                if endpoint != known[rank] and not endpoint.get("ended"):
                    replies[rank] = Reply(State.UNKNOWN, {})
        for rank in ranks:
            if rank not in replies:
                ended = self._endpoints.get(rank, {}).get("ended", False)
                replies[rank] = Reply(State.ENDED if ended else State.UNKNOWN, {})
        return replies

    def probe_neighbours(self, groups: Iterable[Group]) -> None:
        """Query the ranks after this one in these groups, once each, if the pause is over."""
        now = time.monotonic()
        if now < self._due:
            return
        near = {group.ranks[(group.rank + n) % group.size] for group in groups for n in range(1, _NEIGHBOURS + 1)}
        unprobed = sorted(near - self._probed - {self._rank})
        if unprobed:
            self._look_up([rank for rank in unprobed if not self._is_known(rank)])
            hosts = {rank: self._endpoints[rank].get("machine") for rank in unprobed if rank in self._endpoints}
            self.ask(rank for rank, host in hosts.items() if host not in self._reached)
            self._probed |= {rank for rank, host in hosts.items() if host in self._reached}
            self._pause = min(2 * self._pause, _MAX_PAUSE)
        self._due = now + self._pause

    def token(self, rank: int) -> str:
        """Return the token of a rank's current or last beacon; "" if unknown."""
        token: str = self._endpoints.get(rank, {}).get("token", "")
        return token

    def lost_for_long(self, replies: dict[int, Reply]) -> tuple[int, ...]:
        """Return the ranks among these replies that have been unreachable for longer than the timeout."""
        now = time.monotonic()
        lost = []
        for rank, reply in replies.items():
            if reply.state is not State.UNREACHABLE or not self._reachable(rank):
                self._unreachable.pop(rank, None)
                continue
            since, asked = self._unreachable.get(rank, (now - ANSWER_SECONDS, now))
            if now - asked > _FAILURE_EXPIRES:
                since = now - ANSWER_SECONDS  # no query in between: it may have been reachable
            self._unreachable[rank] = (since, now)
            if now - since > default_timeout():
                lost.append(rank)
        return tuple(sorted(lost))

    def ended(self, replies: dict[int, Reply], finished: Container[int]) -> tuple[int, ...]:
        """Return the ranks whose process has exited; those that exited normally only if they are in `finished`."""
        gone = [rank for rank, reply in replies.items() if reply.state is State.ENDED]
        regular = {rank for rank in gone if self._endpoints.get(rank, {}).get("ended")}
        return tuple(sorted(rank for rank in gone if (rank in finished if rank in regular else self._reachable(rank))))

    def ended_text(self, ranks: tuple[int, ...]) -> str:
        """Describe how these ranks exited."""
        regular = [rank for rank in ranks if self._endpoints.get(rank, {}).get("ended")]
        how = "ended regularly" if regular else "ended: killed, or exited without cleaning up"
        return f"{names(ranks)} {'have' if len(ranks) > 1 else 'has'} {how}"

    def _reachable(self, rank: int) -> bool:
        """True if a connection was ever made to the rank's host: only then is a failure conclusive."""
        return self._endpoints.get(rank, {}).get("machine") in self._reached

    def _is_known(self, rank: int) -> bool:
        """True if the rank's address is known, or that it has exited; one that has left may come back."""
        endpoint = self._endpoints.get(rank, {})
        return "port" in endpoint or bool(endpoint.get("ended"))

    def _look_up(self, ranks: list[int]) -> None:
        """Read the addresses of ranks from the store."""

        def read() -> list[tuple[int, bytes]]:
            keys = [(rank, beacon_key(rank)) for rank in ranks]
            return [(rank, self._store.get(key)) for rank, key in keys if self._store.check([key])]

        for rank, published in within(STORE_SECONDS, read) or ():
            self._endpoints[rank] = json.loads(published)


def beacon_key(rank: int) -> str:
    """Return the key in the store under which a rank publishes its address.

    >>> beacon_key(3)
    'shardwright/beacon/3'
    """
    return f"shardwright/beacon/{rank}"


def names(ranks: tuple[int, ...]) -> str:
    """Format these ranks for a message.

    >>> names((1, 2))
    'ranks 1, 2'
    """
    return f"rank{'s' * (len(ranks) > 1)} {', '.join(map(str, ranks))}"
