"""Queries whether ranks are lost, for code that waits for them.

The watch answers them; it is defined in a layer above, so it registers itself here. A world whose store cannot be
shared has no watch: nothing is known there, and waits end by their timeout.
"""

from __future__ import annotations

import time
from collections.abc import Iterable
from typing import Protocol

from shardwright.errors import RankLostError

__all__ = ["LossDetector", "LossPoll", "is_current", "lost_among", "set_detector", "stamp", "watched"]

_FIRST_PAUSE = 0.5  # seconds before the first query, doubling to _MAX_PAUSE
_MAX_PAUSE = 2.0


class LossDetector(Protocol):
    """Knows which ranks are lost."""

    stamp: str

    def lost_among(self, ranks: Iterable[int]) -> RankLostError | None:
        """Return an error that names the given global ranks that are certainly lost, or None."""
        ...

    def is_current(self, rank: int, stamp: str) -> bool:
        """True if a rank's entry in the store with this stamp belongs to its current world."""
        ...


_detector: LossDetector | None = None


def set_detector(detector: LossDetector | None) -> None:
    """Register the loss detector; None removes it.

    >>> set_detector(None)
    """
    global _detector
    _detector = detector


def watched() -> bool:
    """True if a loss detector is registered.

    >>> watched()
    False
    """
    return _detector is not None


def lost_among(ranks: Iterable[int]) -> RankLostError | None:
    """Return an error that names the given global ranks that are certainly lost, or None.

    >>> lost_among([0])
    """
    return None if _detector is None else _detector.lost_among(ranks)


def stamp() -> str:
    """Return the mark of this world for this rank's entries in the store, which another world may share.

    >>> stamp()
    ''
    """
    return "" if _detector is None else _detector.stamp


def is_current(rank: int, written: str) -> bool:
    """True if a rank's entry with this stamp belongs to its current world, as far as is known.

    >>> is_current(0, "")
    True
    """
    return _detector is None or _detector.is_current(rank, written)


class LossPoll:
    """Repeated queries about ranks that are waited for, with growing pauses.

    >>> LossPoll().lost([0])
    """

    def __init__(self) -> None:
        self._pause = _FIRST_PAUSE
        self._due = time.monotonic() + _FIRST_PAUSE

    def lost(self, ranks: Iterable[int]) -> RankLostError | None:
        """Return the result of `lost_among` if the pause is over, else None."""
        if time.monotonic() < self._due:
            return None
        found = lost_among(ranks)
        self._pause = min(2 * self._pause, _MAX_PAUSE)
        self._due = time.monotonic() + self._pause
        return found
