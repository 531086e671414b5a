"""What an unrequested movement does, and whether plain tensors may be taken for replicates."""

from __future__ import annotations

import contextvars
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Literal

from shardwright.errors import CommunicationError
from shardwright.layout import Layout, Partial

__all__ = ["CommunicationWarning", "check", "communication", "current", "implicit_replication", "replicates_implicitly"]

Policy = Literal["implicit", "warn", "explicit"]

_policy: contextvars.ContextVar[Policy] = contextvars.ContextVar("shardwright_policy", default="implicit")
_replicating: contextvars.ContextVar[bool] = contextvars.ContextVar("shardwright_replicating", default=False)


class CommunicationWarning(UserWarning):
    """An operator moved data that nobody asked it to move.

    >>> import warnings, shardwright as sw
    >>> warnings.simplefilter("error", sw.CommunicationWarning)  # under sw.communication("warn"): refuse after all
    """


@contextmanager
def communication(policy: Policy) -> Iterator[None]:
    """Says what an operator that needs to move data does: `implicit` (moves it), `warn`, or `explicit` (refuses).

    Movements you ask for (`redistribute`, `full_tensor`, `to_local`) are always made.

    >>> import shardwright as sw
    >>> with sw.communication("explicit"):
    ...     pass
    """
    if policy not in ("implicit", "warn", "explicit"):
        raise CommunicationError(f"communication policy {policy!r} is unknown: it is implicit, warn or explicit")
    token = _policy.set(policy)
    try:
        yield
    finally:
        _policy.reset(token)


@contextmanager
def implicit_replication() -> Iterator[None]:
    """Takes plain tensors beside DTensors for replicates: say so only where every rank holds the same values.

    >>> import shardwright as sw
    >>> with sw.implicit_replication():
    ...     pass
    """
    token = _replicating.set(True)
    try:
        yield
    finally:
        _replicating.reset(token)


def current() -> Policy:
    """What an operator that needs to move data does now."""
    return _policy.get()


def replicates_implicitly() -> bool:
    """Whether `implicit_replication` is on."""
    return _replicating.get()


def check(name: str, moves: Sequence[tuple[Layout, Layout] | None]) -> None:
    """Lets an operator's movements pass, or warns, or refuses, as the policy says."""
    policy = _policy.get()
    if policy == "implicit" or not any(moves):
        return
    needed = [step for step in moves if step is not None and _communicates(*step)]
    if not needed:
        return
    source, target = needed[0]
    message = (
        f"{name} needs {source} as {target}, which moves data nobody asked for: redistribute it before the call, "
        'or allow it with sw.communication("implicit")'
    )
    if policy == "explicit":
        raise CommunicationError(message)
    warnings.warn(message, CommunicationWarning, stacklevel=5)


def _communicates(source: Layout, target: Layout) -> bool:
    for before, after, ranks in zip(source.placements, target.placements, source.mesh.shape, strict=True):
        moves = before != after and (before.is_shard() or isinstance(before, Partial)) and ranks > 1
        if moves and not (before.is_shard() and isinstance(after, Partial)):
            return True
    return False
