"""All ranks succeed, or all of them raise the same error."""

from __future__ import annotations

import json
import traceback
from collections.abc import Callable
from typing import TypeVar

from shardwright.comm.coordinate import gather_bytes, open_channel
from shardwright.comm.group import Group, world
from shardwright.comm.timeout import default_timeout
from shardwright.errors import Failure, RankFailedError, RankLostError

__all__ = ["agree", "agree_telling"]

T = TypeVar("T")

_DONE, _FAILED = b"+", b"-"  # what a rank's note begins with
_BUDGET = 1 << 20  # characters of all ranks' messages and tracebacks together


def agree(step: Callable[[], T], *, what: str, group: Group | None = None, timeout: float | None = None) -> T:
    """What `step()` returned here, once it has succeeded on every rank of the group.

    If it raised anywhere, every rank raises the same `RankFailedError`, which names `what`, the ranks and their
    messages; on a rank that failed, the exception itself is its `__cause__` (one that is no `Exception`, such as
    `KeyboardInterrupt`, is raised itself, after the others were told). A rank that dies meanwhile, or does not
    come within `timeout` seconds (default: `default_timeout()`) of the last arrival, is named by a
    `RankLostError` on all others. After a `RankFailedError` the group can agree again; after a loss it cannot.

    Ranks need not talk to each other inside `step`; where they do, one that waits there for a rank that failed
    waits as long as that collective's own timeout.

    >>> agree(lambda: 6 * 7, what="compute")
    42
    >>> agree(lambda: 1 // 0, what="divide")
    Traceback (most recent call last):
    shardwright.errors.RankFailedError: divide failed on 1 rank
      rank 0: ZeroDivisionError: integer division or modulo by zero
    """

    def silently() -> tuple[T, bytes]:
        return step(), b""

    return agree_telling(silently, what=what, group=group, timeout=timeout)[0]


def agree_telling(
    step: Callable[[], tuple[T, bytes]], *, what: str, group: Group | None = None, timeout: float | None = None
) -> tuple[T, list[bytes]]:
    """`agree`, where each rank also tells the others a word in the same round: the result, and all ranks' words.

    >>> agree_telling(lambda: (42, b"mine"), what="compute")
    (42, [b'mine'])
    """
    group = group or world()
    seconds = default_timeout() if timeout is None else timeout
    if group.size > 1:
        open_channel(group, what=what, timeout=seconds)  # before the step: a death in it must break a connection
    own: BaseException | None = None
    try:
        result, word = step()
    except BaseException as error:  # noqa: BLE001  every failure is told to the other ranks, then raised
        own, word = error, b""
    try:
        notes = gather_bytes(_note(own, word, group), group, what=what, timeout=seconds)
    except RankLostError as lost:
        raise lost from own
    if own is not None and not isinstance(own, Exception):
        raise own
    failures = tuple(
        Failure(group.ranks[index], **json.loads(note[1:]))
        for index, note in enumerate(notes)
        if note.startswith(_FAILED)
    )
    if failures:
        raise RankFailedError(what, failures) from own
    return result, [note[1:] for note in notes]


def _note(error: BaseException | None, word: bytes, group: Group) -> bytes:
    """What the other ranks are told: the word of a success, of a failure no more than this rank's share."""
    if error is None:
        return _DONE + word
    share = max(500, _BUDGET // (2 * group.size))
    frames = "".join(traceback.format_exception(error))
    told = {"kind": type(error).__name__, "message": str(error)[:share], "traceback": frames[-share:]}
    return _FAILED + json.dumps(told).encode()
