"""One rank looks, and tells the others: for what only one may do, and all must know alike."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import msgspec

from shardwright import comm, errors
from shardwright.errors import CheckpointError, ShardwrightError, StorageError

__all__ = ["first_rank_finds"]

T = TypeVar("T")


def first_rank_finds(look: Callable[[], T], kind: Any, *, what: str, group: comm.Group) -> T:
    """Return on every rank what `look` returns on the first rank of the group; where it raises, raise an error alike.

    An error of the checkpoint or the storage has the same type on all ranks, one of the system is a `StorageError`.
    `kind` is the type of the result, which travels as JSON. Ranks that are not at the same `what` are told so.

    >>> first_rank_finds(lambda: {7: "seven"}, dict[int, str], what="counting", group=comm.world())
    {7: 'seven'}
    """
    own: Exception | None = None
    said = b""
    if group.rank == 0:
        try:
            said = msgspec.json.encode([None, look()])
        except Exception as error:  # noqa: BLE001  raised below, once the others have been told
            own = _typed(error, what)
            said = msgspec.json.encode([type(own).__name__, str(own)])
    said = comm.gather_bytes(said, group, what=what)[0]
    if own is not None:
        raise own
    failed, found = msgspec.json.decode(said, type=tuple[str | None, msgspec.Raw])
    if failed is not None:
        raised = getattr(errors, failed, CheckpointError)
        if not issubclass(raised, CheckpointError | StorageError):
            raised = CheckpointError
        raise raised(f"rank {group.ranks[0]}: {msgspec.json.decode(found)}")
    value: T = msgspec.json.decode(found, type=kind)
    return value


def _typed(error: Exception, what: str) -> Exception:
    """Return the error; one of the system as a `StorageError`."""
    if not isinstance(error, OSError) or isinstance(error, ShardwrightError):
        return error
    typed = StorageError(f"{what}: {error}")
    typed.__cause__ = error
    return typed
