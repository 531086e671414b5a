"""One rank looks, and tells the others: for what only one may do, and all must know alike."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import msgspec

from shardwright import comm, errors
from shardwright.errors import CheckpointError, StorageError

__all__ = ["first_rank_finds"]

T = TypeVar("T")


def first_rank_finds(look: Callable[[], T], kind: Any, *, what: str, group: comm.Group) -> T:
    """What `look` returns on the first rank of the group, on every rank; where it raises, an error of the same type.

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
            own = error
            said = msgspec.json.encode([type(error).__name__, str(error)])
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
