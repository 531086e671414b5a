"""Traffic counters: every collective reports itself here, at the cost of one comparison if nothing listens.

Bytes are those of the payload that this rank *receives from others*: no padding, no headers, nothing a rank sends
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
    """One collective on one rank: its kind, the bytes received from others, and the global ranks in it.

    >>> Transfer("all_gather", 96, (0, 1, 2, 3)).received
    96
    """

    kind: str
    received: int
    ranks: tuple[int, ...]


@dataclass(slots=True)
class Traffic:
    """The sum of transfers: `calls` and `received` bytes by kind of collective.

    >>> traffic = Traffic()
    >>> traffic.add(Transfer("broadcast", 8, (0, 1)))
    >>> traffic.calls["broadcast"], traffic.bytes
    (1, 8)
    """

    calls: Counter[str] = field(default_factory=Counter)
    received: Counter[str] = field(default_factory=Counter)

    def add(self, transfer: Transfer) -> None:
        """Add one transfer."""
        self.calls[transfer.kind] += 1
        self.received[transfer.kind] += transfer.received

    @property
    def bytes(self) -> int:
        """The total number of bytes received."""
        return self.received.total()


# Per process, not per thread: autograd runs backward collectives on its own threads.
_listeners: tuple[Callable[[Transfer], None], ...] = ()


@contextmanager
def listen(listener: Callable[[Transfer], None]) -> Iterator[None]:
    """Call `listener` with every Transfer that this process starts inside the block.

    >>> with listen(print):
    ...     pass
    """
    global _listeners
    _listeners = (*_listeners, listener)
    try:
        yield
    finally:
        # Remove this registration only: the same listener may be open twice.
        index = len(_listeners) - 1 - _listeners[::-1].index(listener)
        _listeners = _listeners[:index] + _listeners[index + 1 :]


@contextmanager
def count() -> Iterator[Traffic]:
    """Count the collectives that this rank starts inside the block, and the bytes it receives.

    >>> import torch
    >>> from shardwright import comm
    >>> with comm.count() as traffic:
    ...     _ = comm.all_reduce(torch.ones(4))
    >>> traffic.bytes  # a single rank receives nothing
    0
    """
    traffic = Traffic()
    with listen(traffic.add):
        yield traffic


def report(kind: str, received: int, group: Group) -> None:
    """Report a transfer to the listeners."""
    if _listeners:
        transfer = Transfer(kind, received, group.ranks)
        for listener in _listeners:
            listener(transfer)
