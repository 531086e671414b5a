"""System calls of a storage that count what they read, or wait."""

from __future__ import annotations

import threading
from collections.abc import Sequence

from shardwright.storage import Calls


class CountingReads(Calls):
    """Count the bytes that are read."""

    def __init__(self) -> None:
        self.read = 0

    def preadv(self, fd: int, buffers: Sequence[memoryview], offset: int) -> int:
        got = super().preadv(fd, buffers, offset)
        self.read += got
        return got


class Gate(Calls):
    """Writes wait until the gate is opened."""

    def __init__(self) -> None:
        self.opened = threading.Event()

    def pwritev(self, fd: int, buffers: Sequence[memoryview], offset: int) -> int:
        assert self.opened.wait(60)
        return super().pwritev(fd, buffers, offset)
