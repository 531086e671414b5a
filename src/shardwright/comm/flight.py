"""Messages and collectives that torch has in flight for us."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

__all__ = ["Flight", "Work"]


class Work(Protocol):
    """The handle torch returns for an asynchronous operation."""

    def wait(self) -> object:
        """Return when the operation is complete; raise a RuntimeError if it failed."""
        ...


@dataclass(frozen=True, slots=True)
class Flight:
    """An operation in flight: the handle, and the peer (by group index) if only one is involved.

    `number`, `nbytes` and `incoming` are those of the message, see ledger.py.
    """

    work: Work
    peer: int | None = None
    number: int | None = None
    nbytes: int = 0
    incoming: bool = True
