"""What every rank says before an operator's ranks exchange values: a few bytes, and that nothing is wrong.

It goes over the coordination channel, not the training group: a rank that does not come, or does something else, is
named after `comm.default_timeout()`. It costs one round. Only where a rank's arguments are wrong, or ranks called with
different ones, do they say more, and all of them raise.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from typing import TypeVar

from shardwright import comm

__all__ = ["announce"]

T = TypeVar("T")

_WRONG = b"!"  # in the place of a digest, which is longer


def announce(prepare: Callable[[], tuple[T, bytes]], alike: str, group: comm.Group, what: str) -> tuple[T, list[bytes]]:
    """What `prepare` made here, and what every rank of the group says.

    `prepare` returns what it made and what this rank says. `alike` describes what all ranks must have been given alike.
    If `prepare` raises on any rank, or these texts differ, all ranks raise: see `together`.

    >>> announce(lambda: ("made", b"three"), "a table of [4, 2]", comm.world(), "embedding")
    ('made', [b'three'])
    """
    fault: Exception | None = None
    digest = hashlib.blake2b(alike.encode(), digest_size=8).digest()
    message = _WRONG
    try:
        made, said = prepare()
        message = digest + said
    except Exception as error:  # noqa: BLE001  # whatever it is, all ranks are told, and all raise
        fault = error

    def say() -> tuple[None, str]:
        if fault is not None:
            raise fault
        return None, alike

    heard = comm.gather_bytes(message, group, what=what)
    if any(one[: len(digest)] != digest for one in heard):
        comm.agree(say, what=what, group=group, same=True, unwrap=True)
    return made, [one[len(digest) :] for one in heard]
