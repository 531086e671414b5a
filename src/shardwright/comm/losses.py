"""Asking, from wherever a rank waits for others, whether one of them is lost.

The watch answers; it is made after what asks here, so it registers itself. A world whose store cannot be shared has no
watch: there nothing is ever known, and waits end by their timeout.
"""

from __future__ import annotations

import time
from collections.abc import Iterable
from typing import Protocol

from shardwright.errors import RankLostError

__all__ = ["Informant", "Inquiry", "inform", "lost_among", "stamp", "still_stands", "watched"]

_PAUSE = 0.5  # seconds before the first question, doubling to _PAUSE_MOST
_PAUSE_MOST = 2.0


class Informant(Protocol):
    """What knows of losses."""

    stamp: str

    def lost_among(self, ranks: Iterable[int]) -> RankLostError | None:
        """Return an error that names those of the ranks (by global number) that are certainly lost, if any are."""
        ...

    def still_stands(self, rank: int, stamp: str) -> bool:
        """Return whether what a rank wrote in the store with this stamp was written in the world it is in now."""
        ...


_informant: Informant | None = None


def inform(informant: Informant | None) -> None:
    """Have this object answer from now on; None for nobody.

    >>> inform(None)
    """
    global _informant
    _informant = informant


def watched() -> bool:
    """Return whether losses can be known at all.

    >>> watched()
    False
    """
    return _informant is not None


def lost_among(ranks: Iterable[int]) -> RankLostError | None:
    """Return an error that names those of the ranks (by global number) that are certainly lost; None if none are.

    >>> lost_among([0])
    """
    return None if _informant is None else _informant.lost_among(ranks)


def stamp() -> str:
    """Return what marks notes of this rank in the store as written in this world: another may use the same store.

    >>> stamp()
    ''
    """
    return "" if _informant is None else _informant.stamp


def still_stands(rank: int, written: str) -> bool:
    """Return whether a rank's note with this stamp was written in the world it is in now, as far as can be known.

    >>> still_stands(0, "")
    True
    """
    return _informant is None or _informant.still_stands(rank, written)


class Inquiry:
    """Asks about ranks again and again while they are waited for, with pauses.

    >>> Inquiry().lost([0])
    """

    def __init__(self) -> None:
        self._pause = _PAUSE
        self._due = time.monotonic() + _PAUSE

    def lost(self, ranks: Iterable[int]) -> RankLostError | None:
        """Return what `lost_among` does, if it is time to ask again; else None."""
        if time.monotonic() < self._due:
            return None
        found = lost_among(ranks)
        self._pause = min(2 * self._pause, _PAUSE_MOST)
        self._due = time.monotonic() + self._pause
        return found
