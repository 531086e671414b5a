"""Ranks that run different programs, found and named instead of left hanging.

A movement is collective: ranks that disagree about the next one wait for each other for ever. `verify_ranks` has
them compare notes before each; without it they do so once a collective has failed, so that the error names the
ranks, the operators and the source lines.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager

from shardwright import comm
from shardwright.errors import CommError, ProgramMismatchError, RankLostError
from shardwright.layout import Layout
from shardwright.tensor.base.trace import operation_name, source_line

__all__ = ["check_same_program", "post_mortem", "verify_ranks"]

_verifying = False
POST_MORTEM_SECONDS = 5.0


@contextmanager
def verify_ranks() -> Iterator[None]:
    """Has the ranks check, before every movement, that all of them are about to make the same one.

    It costs a message a movement: for debugging. Open it on all ranks.

    >>> import shardwright as sw
    >>> with sw.verify_ranks():
    ...     pass
    """
    global _verifying
    before, _verifying = _verifying, True
    try:
        yield
    finally:
        _verifying = before


def check_same_program(source: Layout, target: Layout) -> None:
    """Raises on every rank where they are about to make different movements, if `verify_ranks` is open."""
    if _verifying:
        _compare(source, target, None)


def post_mortem(source: Layout, target: Layout, error: CommError) -> CommError:
    """Return the error to raise after a collective has failed: who was where, if all ranks still answer."""
    if isinstance(error, RankLostError):
        return error  # there is nobody to compare with, and it says where the others are
    try:
        _compare(source, target, POST_MORTEM_SECONDS)
    except ProgramMismatchError as mismatch:
        mismatch.__cause__ = error
        return mismatch
    except CommError as silence:
        error.add_note(f"afterwards: {silence}")
    return error


def _compare(source: Layout, target: Layout, timeout: float | None) -> None:
    ranks = sorted({*source.mesh.ranks, *target.mesh.ranks})
    if len(ranks) == 1 or comm.rank() not in ranks:
        return
    note = json.dumps([operation_name() or "redistribute", f"{source} → {target}", source_line()])
    group = comm.subgroup(ranks)
    heard = comm.gather_bytes(note.encode(), group, what="comparing programs", timeout=timeout)
    notes = dict(zip(group.ranks, (json.loads(entry) for entry in heard), strict=True))
    if len({(name, movement) for name, movement, _ in notes.values()}) == 1:
        return
    said = "\n  ".join(f"rank {rank}: {name} at {line}: {what}" for rank, (name, what, line) in notes.items())
    raise ProgramMismatchError(f"the ranks run different programs:\n  {said}")
