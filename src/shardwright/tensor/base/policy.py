"""Policies: what to do about implicit communication, and whether plain tensors count as replicated."""

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
    """An operator communicated although the program did not ask for it.

    >>> import warnings, shardwright as sw
    >>> warnings.simplefilter("error", sw.CommunicationWarning)  # make sw.communication("warn") raise
    """


@contextmanager
def communication(policy: Policy) -> Iterator[None]:
    """Set what an operator that needs to redistribute its inputs does.

    `implicit` redistributes them, `warn` does so with a `CommunicationWarning`, `explicit` raises `CommunicationError`.
    Redistributions that the program asks for (`redistribute`, `full_tensor`, `to_local`) always run.

    >>> import shardwright as sw
    >>> with sw.communication("explicit"):
    ...     pass
    """
    if policy not in ("implicit", "warn", "explicit"):
        raise CommunicationError(f"policy must be 'implicit', 'warn' or 'explicit', got {policy!r}")
    token = _policy.set(policy)
    try:
        yield
    finally:
        _policy.reset(token)


@contextmanager
def implicit_replication() -> Iterator[None]:
    """Treat plain tensors beside DTensors as replicated. Every rank must hold the same values in them.

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
    """Return the current communication policy."""
    return _policy.get()


def replicates_implicitly() -> bool:
    """Return whether `implicit_replication` is active."""
    return _replicating.get()


def check(name: str, moves: Sequence[tuple[Layout, Layout] | None]) -> None:
    """Allow an operator's redistributions, warn or raise, according to the policy."""
    policy = _policy.get()
    if policy == "implicit" or not any(moves):
        return
    needed = [layouts for layouts in moves if layouts is not None and _communicates(*layouts)]
    if not needed:
        return
    source, target = needed[0]
    message = (
        f"{name} needs {source} as {target}, which takes implicit communication: redistribute it before the call, "
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
