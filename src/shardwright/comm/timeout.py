"""How long ranks wait for each other."""

from __future__ import annotations

import os

__all__ = ["default_timeout"]


def default_timeout() -> float:
    """Return how many seconds ranks wait for each other: 300, or the environment's SHARDWRIGHT_TIMEOUT.

    >>> default_timeout()
    300.0
    """
    return float(os.environ.get("SHARDWRIGHT_TIMEOUT", "300"))
