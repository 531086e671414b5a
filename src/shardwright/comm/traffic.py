"""What moved: every collective reports itself here, and costs one comparison when nobody listens.

Bytes are those of the payload this rank *receives from others*: no padding, no headers, nothing a rank sends
to itself. An all-reduce counts as a reduce-scatter followed by an all-gather.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from shardwright.comm.group import Group

__all__ = ["Traffic", "Transfer", "count", "listen", "report"]


@dataclass(frozen=True, slots=True)
class Transfer:
    """One collective as one rank saw it: its kind, the bytes received from others, the global ranks in it.

    >>> Transfer("all_gather", 96, (0, 1, 2, 3)).received
    96
    """

    kind: str
    received: int
    ranks: tuple[int, ...]


@dataclass(slots=True)
class Traffic:
    """The sum of the transfers seen: `calls` and `received` bytes by kind of collective.

    >>> traffic = Traffic()
    >>> traffic.add(Transfer("broadcast", 8, (0, 1)))
    >>> traffic.calls["broadcast"], traffic.bytes
    (1, 8)
    """

    calls: Counter[str] = field(default_factory=Counter)
    received: Counter[str] = field(default_factory=Counter)

    def add(self, transfer: Transfer) -> None:
        """Counts one more transfer."""
        self.calls[transfer.kind] += 1
        self.received[transfer.kind] += transfer.received

    @property
    def bytes(self) -> int:
        """All bytes received, whatever the kind."""
        return self.received.total()


# Of the process, not of the thread: autograd runs backward collectives on threads of its own.
_listeners: tuple[Callable[[Transfer], None], ...] = ()


@contextmanager
def listen(listener: Callable[[Transfer], None]) -> Iterator[None]:
    """Calls `listener` with every Transfer this process starts while the context is open.

    >>> with listen(print):
    ...     pass
    """
    global _listeners
    _listeners = (*_listeners, listener)
    try:
        yield
    finally:
        # Remove this registration only: the same listener may be open twice.
        where = len(_listeners) - 1 - _listeners[::-1].index(listener)
        _listeners = _listeners[:where] + _listeners[where + 1 :]


@contextmanager
def count() -> Iterator[Traffic]:
    """Counts the collectives this rank starts, and the bytes it receives by them.

    >>> import torch
    >>> from shardwright import comm
    >>> with comm.count() as traffic:
    ...     _ = comm.all_reduce(torch.ones(4))
    >>> traffic.bytes  # one rank has nobody to receive from
    0
    """
    traffic = Traffic()
    with listen(traffic.add):
        yield traffic


def report(kind: str, received: int, group: Group) -> None:
    """Tells the listeners of one transfer."""
    if _listeners:
        transfer = Transfer(kind, received, group.ranks)
        for listener in _listeners:
            listener(transfer)
