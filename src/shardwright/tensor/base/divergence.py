"""Detect ranks that run different programs, and name them instead of hanging.

Redistribution is collective: ranks that disagree about the next one would wait for each other forever. With
`verify_ranks` they compare what they are about to do before each; without it they do so once a collective has failed,
so that the error names the ranks, the operators and the source lines.
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
    """Check before every redistribution that all ranks are about to run the same one.

    For debugging: it costs one message per redistribution. Use it on all ranks.

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
    """Inside `verify_ranks`, raise ProgramMismatchError on every rank if they are about to redistribute differently."""
    if _verifying:
        _compare(source, target, None)


def post_mortem(source: Layout, target: Layout, error: CommError) -> CommError:
    """Return the error to raise after a collective failed; a ProgramMismatchError if the ranks' programs differ."""
    if isinstance(error, RankLostError):
        return error  # a rank is lost: there is nothing to compare, and the error says where the others are
    try:
        _compare(source, target, POST_MORTEM_SECONDS)
    except ProgramMismatchError as mismatch:
        mismatch.__cause__ = error
        return mismatch
    except CommError as failure:
        error.add_note(f"comparing the ranks' programs failed as well: {failure}")
    return error


def _compare(source: Layout, target: Layout, timeout: float | None) -> None:
    ranks = sorted({*source.mesh.ranks, *target.mesh.ranks})
    if len(ranks) == 1 or comm.rank() not in ranks:
        return
    message = json.dumps([operation_name() or "redistribute", f"{source} → {target}", source_line()])
    group = comm.subgroup(ranks)
    gathered = comm.gather_bytes(message.encode(), group, what="comparing programs", timeout=timeout)
    programs = dict(zip(group.ranks, map(json.loads, gathered), strict=True))
    if len({(name, layouts) for name, layouts, _ in programs.values()}) == 1:
        return
    lines = "\n  ".join(f"rank {rank}: {name} at {line}: {what}" for rank, (name, what, line) in programs.items())
    raise ProgramMismatchError(f"the ranks run different programs:\n  {lines}")
