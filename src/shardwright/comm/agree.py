"""Agreement: a step succeeds on all ranks of a group, or all of them raise the same error."""

from __future__ import annotations

import json
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any, Literal, TypeVar, overload

import msgspec

from shardwright import errors
from shardwright.comm.coordinate import gather_bytes, open_channel
from shardwright.comm.group import Group, world
from shardwright.comm.timeout import default_timeout
from shardwright.errors import (
    CommError,
    DisagreementError,
    Failure,
    RankFailedError,
    RankLostError,
    ShardwrightError,
    StorageError,
)
from shardwright.listing import join_first

__all__ = ["agree", "common_error", "on_first_rank", "unwrap_common_error"]

T = TypeVar("T")

_SUCCESS, _FAILURE = b"+", b"-"  # the first byte of a rank's report
_BUDGET = 1 << 20  # characters of all ranks' messages and tracebacks together
_MAX_LISTED = 16


@overload
def agree(
    step: Callable[[], T],
    *,
    what: str,
    group: Group | None = None,
    timeout: float | None = None,
    unwrap: bool = False,
) -> T: ...


@overload
def agree(
    step: Callable[[], tuple[T, str]],
    *,
    what: str,
    group: Group | None = None,
    timeout: float | None = None,
    same: Literal[True],
    unwrap: bool = False,
) -> T: ...


@overload
def agree(
    step: Callable[[], tuple[T, bytes]],
    *,
    what: str,
    group: Group | None = None,
    timeout: float | None = None,
    gather: Literal[True],
    unwrap: bool = False,
) -> tuple[T, list[bytes]]: ...


@overload
def agree(
    step: Callable[[], tuple[T, str, bytes]],
    *,
    what: str,
    group: Group | None = None,
    timeout: float | None = None,
    same: Literal[True],
    gather: Literal[True],
    unwrap: bool = False,
) -> tuple[T, list[bytes]]: ...


def agree(
    step: Callable[[], Any],
    *,
    what: str,
    group: Group | None = None,
    timeout: float | None = None,
    same: bool = False,
    gather: bool = False,
    unwrap: bool = False,
) -> Any:
    """Run `step` and return its result once it has succeeded on every rank of the group.

    If it raises on any rank, every rank raises the same `RankFailedError`, which names `what`, the ranks and their
    messages; on a rank that failed, the exception itself is its `__cause__` (one that is not an `Exception`, such as
    `KeyboardInterrupt`, is raised itself, after it was reported to the other ranks). A rank that dies meanwhile, or
    does not arrive within `timeout` seconds (default: `default_timeout()`) of the last arrival, is named by a
    `RankLostError` on all others. After a `RankFailedError` the group can agree again; after a loss it cannot.

    With `same=True`, `step` returns its result and a string that must be equal on all ranks; if it is not, all raise a
    `DisagreementError`. With `gather=True`, `step` also returns bytes, and the call returns the result and the list of
    all ranks' bytes. Both take no further round of messages. With `unwrap=True`, an error that is the same on all ranks
    is raised itself, instead of a `RankFailedError`.

    Ranks do not have to communicate inside `step`; if they do, a rank that waits there for one that failed waits for
    that collective's own timeout.

    >>> agree(lambda: 6 * 7, what="compute")
    42
    >>> agree(lambda: (42, "of size 3", b"mine"), what="compute", same=True, gather=True)
    (42, [b'mine'])
    >>> agree(lambda: 1 // 0, what="divide")
    Traceback (most recent call last):
    shardwright.errors.RankFailedError: divide failed on 1 rank
      rank 0: ZeroDivisionError: integer division or modulo by zero
    """
    group = group or world()

    def run() -> tuple[Any, bytes]:
        if not (same or gather):
            return step(), b""
        result, *rest = step()
        text = rest[0].encode() if same else b""
        return result, len(text).to_bytes(4, "big") + text + (rest[-1] if gather else b"")

    with unwrap_common_error(group) if unwrap else nullcontext():
        result, messages = _agree(run, what, group, timeout)
    if not (same or gather):
        return result
    ends = [4 + int.from_bytes(message[:4], "big") for message in messages]
    texts = [message[4:end] for message, end in zip(messages, ends, strict=True)]
    if any(text != texts[0] for text in texts):
        listed = [f"rank {rank} has {text.decode()}" for rank, text in zip(group.ranks, texts, strict=True)]
        raise DisagreementError(f"{what}: ranks disagree: {join_first(listed, _MAX_LISTED, '; ')}")
    return (result, [message[end:] for message, end in zip(messages, ends, strict=True)]) if gather else result


def _agree(
    step: Callable[[], tuple[T, bytes]], what: str, group: Group, timeout: float | None
) -> tuple[T, list[bytes]]:
    """Run `step`; return its result and the bytes of all ranks once all have succeeded."""
    seconds = default_timeout() if timeout is None else timeout
    if group.size > 1 and not group.simulated:
        open_channel(group, what=what, timeout=seconds)  # before the step: a death in it must break a connection
    own: BaseException | None = None
    try:
        result, message = step()
    except BaseException as error:  # noqa: BLE001  every failure is reported to the other ranks, then raised
        own, message = error, b""
    try:
        reports = gather_bytes(_report(own, message, group), group, what=what, timeout=seconds)
    except RankLostError as lost:
        raise lost from own
    if own is not None and not isinstance(own, Exception):
        raise own
    failures = tuple(
        Failure(group.ranks[index], **json.loads(report[1:]))
        for index, report in enumerate(reports)
        if report.startswith(_FAILURE)
    )
    if failures:
        raise RankFailedError(what, failures) from own
    return result, [report[1:] for report in reports]


def _report(error: BaseException | None, message: bytes, group: Group) -> bytes:
    """Encode a rank's message, or its error, cut to this rank's share of the budget."""
    if error is None:
        return _SUCCESS + message
    share = max(500, _BUDGET // (2 * group.size))
    frames = "".join(traceback.format_exception(error))
    report = {"kind": type(error).__name__, "message": str(error)[:share], "traceback": frames[-share:]}
    return _FAILURE + json.dumps(report).encode()


def common_error(error: RankFailedError, group: Group) -> ShardwrightError | None:
    """Return this rank's own error if every rank of the group failed with the same type and message, else None.

    >>> from shardwright.errors import LayoutError
    >>> failed = RankFailedError("check", (Failure(0, "LayoutError", "no"),))
    >>> failed.__cause__ = LayoutError("no")
    >>> common_error(failed, world())
    LayoutError('no')
    """
    own = error.__cause__
    kinds = {(failure.kind, failure.message) for failure in error.failures}
    if len(error.failures) == group.size and len(kinds) == 1 and isinstance(own, ShardwrightError):
        return own
    return None


@contextmanager
def unwrap_common_error(group: Group) -> Iterator[None]:
    """Around several agreements: raise an error that is the same on all ranks of the group as itself.

    An error on some ranks only remains the `RankFailedError` that names them.

    >>> from shardwright.errors import StateError
    >>> def fail():
    ...     raise StateError("w: not stored")
    >>> with unwrap_common_error(world()):
    ...     agree(fail, what="save")
    Traceback (most recent call last):
    shardwright.errors.StateError: w: not stored
    """
    try:
        yield
    except RankFailedError as error:
        own = common_error(error, group)
        if own is None:
            raise
    else:
        return
    raise own from own.__cause__  # without the RankFailedError, which adds nothing


def on_first_rank(
    step: Callable[[], T], kind: Any, *, what: str, group: Group, error: type[ShardwrightError] = ShardwrightError
) -> T:
    """Run `step` on the first rank of the group and return its result on every rank; if it raises, all raise.

    `kind` is the type of the result, which is sent as JSON. An error of this library keeps its type on all ranks, an
    `OSError` becomes a `StorageError`, and any other is an `error` on the other ranks. Ranks that are at a different
    `what` raise.

    >>> on_first_rank(lambda: {7: "seven"}, dict[int, str], what="counting", group=world())
    {7: 'seven'}
    """
    own: Exception | None = None
    message = b""
    if group.rank == 0:
        try:
            message = msgspec.json.encode([None, step()])
        except Exception as raised:  # noqa: BLE001  raised below, once it was sent to the other ranks
            own = _as_library_error(raised, what)
            message = msgspec.json.encode([type(own).__name__, str(own)])
    message = gather_bytes(message, group, what=what)[0]
    if own is not None:
        raise own
    failed, result = msgspec.json.decode(message, type=tuple[str | None, msgspec.Raw])
    if failed is not None:
        raised_kind = getattr(errors, failed, error)
        if not issubclass(raised_kind, ShardwrightError) or issubclass(raised_kind, CommError):
            raised_kind = error
        raise raised_kind(f"rank {group.ranks[0]}: {msgspec.json.decode(result)}")
    value: T = msgspec.json.decode(result, type=kind)
    return value


def _as_library_error(error: Exception, what: str) -> Exception:
    """Convert an `OSError` to a `StorageError`; return other errors unchanged."""
    if not isinstance(error, OSError) or isinstance(error, ShardwrightError):
        return error
    typed = StorageError(f"{what}: {error}")
    typed.__cause__ = error
    return typed
