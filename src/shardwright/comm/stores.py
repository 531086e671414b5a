"""Calls on torch's stores with a timeout: the host of the store may be lost."""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import suppress
from typing import Any

__all__ = ["STORE_SECONDS", "within"]

STORE_SECONDS = 3.0


def within(seconds: float, function: Callable[[], Any]) -> Any:
    """Return the result of the function, or None if it does not return in time or the store fails.

    torch's stores wait indefinitely for a host that does not answer.

    >>> within(1.0, lambda: 42)
    42
    """
    found: list[Any] = []

    def call() -> None:
        with suppress(RuntimeError):  # the type of all errors of a store
            found.append(function())

    thread = threading.Thread(target=call, daemon=True)
    thread.start()
    thread.join(seconds)
    return found[0] if found else None
