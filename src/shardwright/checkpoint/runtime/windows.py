"""Scratch buffers of bounded size, for what cannot be read or written in place."""

from __future__ import annotations

from shardwright.checkpoint.format.data_file import BLOCK

__all__ = ["window_size"]

_WINDOW = 8 << 20  # bytes of a thread's window


def window_size(memory: int | None, threads: int) -> tuple[int, int]:
    """Return the size of a window in bytes, and the number of threads that have one, within this much memory.

    >>> window_size(None, threads=2), window_size(5 << 20, threads=2), window_size(1 << 20, threads=2)
    ((8388608, 2), (2097152, 2), (1048576, 1))
    """
    if memory is None:
        return _WINDOW, threads
    count = max(1, min(threads, memory // BLOCK))
    return min(_WINDOW, max(1, memory // count // BLOCK) * BLOCK), count
