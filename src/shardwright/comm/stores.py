"""Calls on torch's stores that end: the host of the store may be the one that is lost."""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import suppress
from typing import Any

__all__ = ["STORE_SECONDS", "within"]

STORE_SECONDS = 3.0


def within(seconds: float, function: Callable[[], Any]) -> Any:
    """Return what the function returns, or None if it has not returned in time or the store has failed.

    torch's stores wait without a limit for a host that does not answer.

    >>> within(1.0, lambda: 42)
    42
    """
    found: list[Any] = []

    def call() -> None:
        with suppress(RuntimeError):  # all errors of a store
            found.append(function())

    thread = threading.Thread(target=call, daemon=True)
    thread.start()
    thread.join(seconds)
    return found[0] if found else None
