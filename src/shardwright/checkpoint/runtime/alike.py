"""What went wrong on every rank alike is raised as it is; what went wrong on some is told with their numbers."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from shardwright import comm
from shardwright.errors import RankFailedError, ShardwrightError

__all__ = ["raised_as_itself", "same_on_all"]


@contextmanager
def raised_as_itself(group: comm.Group) -> Iterator[None]:
    """Raises the error itself where all ranks of the group failed in the same way: always, where there is one.

    A mistake that only some make stays the `RankFailedError` that names them.

    >>> from shardwright.errors import StateError
    >>> def fail():
    ...     raise StateError("w: not stored")
    >>> with raised_as_itself(comm.world()):
    ...     comm.agree(fail, what="save")
    Traceback (most recent call last):
    shardwright.errors.StateError: w: not stored
    """
    try:
        yield
    except RankFailedError as error:
        own = same_on_all(error, group)
        if own is None:
            raise
    else:
        return
    raise own from own.__cause__  # without the RankFailedError, which says no more


def same_on_all(error: RankFailedError, group: comm.Group) -> ShardwrightError | None:
    """This rank's own error, if every rank of the group has failed with one of its type and text."""
    own = error.__cause__
    said = {(failure.kind, failure.message) for failure in error.failures}
    if len(error.failures) == group.size and len(said) == 1 and isinstance(own, ShardwrightError):
        return own
    return None
