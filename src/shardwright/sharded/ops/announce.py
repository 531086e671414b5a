"""Validate the arguments of a collective operator on all ranks before any data is exchanged.

One round of a few bytes over the coordination channel, not the training group: a rank that does not join in, or calls
something else, is reported after `comm.default_timeout()`. A second round is needed only if arguments are invalid or
differ between ranks; then all ranks raise.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from typing import TypeVar

from shardwright import comm

__all__ = ["announce"]

T = TypeVar("T")

_INVALID = b"!"  # instead of a digest, which is longer


def announce(
    prepare: Callable[[], tuple[T, bytes]], arguments: str, group: comm.Group, what: str
) -> tuple[T, list[bytes]]:
    """Return the result of `prepare` and the messages of all ranks of the group.

    `prepare` returns its result and this rank's message. `arguments` describes what must be the same on all ranks. If
    `prepare` raises on any rank, or the arguments differ, all ranks raise: see `comm.agree`.

    >>> announce(lambda: ("result", b"three"), "a table of [4, 2]", comm.world(), "embedding")
    ('result', [b'three'])
    """
    fault: Exception | None = None
    digest = hashlib.blake2b(arguments.encode(), digest_size=8).digest()
    message = _INVALID
    try:
        result, payload = prepare()
        message = digest + payload
    except Exception as error:  # noqa: BLE001  # raised on all ranks below
        fault = error

    def report() -> tuple[None, str]:
        if fault is not None:
            raise fault
        return None, arguments

    gathered = comm.gather_bytes(message, group, what=what)
    if any(received[: len(digest)] != digest for received in gathered):
        comm.agree(report, what=what, group=group, same=True, unwrap=True)
    return result, [received[len(digest) :] for received in gathered]
