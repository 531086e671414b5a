"""The timeout for waiting on other ranks."""

from __future__ import annotations

import os

__all__ = ["default_timeout"]


def default_timeout() -> float:
    """Return the timeout in seconds for waiting on other ranks: SHARDWRIGHT_TIMEOUT, or 300.

    >>> default_timeout()
    300.0
    """
    return float(os.environ.get("SHARDWRIGHT_TIMEOUT", "300"))
