"""Detect ranks that run different programs, and name them instead of hanging.

Redistribution is collective: ranks that disagree about the next one would wait for each other forever. With
`verify_ranks` they compare what they are about to do before each; without it they do so once a collective has failed,
so that the error names the ranks, the operators and the source lines.

Plain tensors that count as replicated are compared as well inside `verify_ranks`: ranks that hold different values in
them would compute different results.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from shardwright import comm
from shardwright.errors import CommError, LocalTensorError, ProgramMismatchError, RankLostError
from shardwright.layout import Layout, Mesh
from shardwright.listing import join_first
from shardwright.tensor.base.trace import operation_name, source_line

__all__ = ["check_same_program", "check_same_values", "post_mortem", "verify_ranks"]

_verifying = False
POST_MORTEM_SECONDS = 5.0


@contextmanager
def verify_ranks() -> Iterator[None]:
    """Check before every redistribution that all ranks are about to run the same one.

    Plain tensors that count as replicated, as in `implicit_replication`, are checked to be the same on all ranks.

    For debugging: it costs one message per redistribution and per such tensor. Use it on all ranks.

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


def check_same_values(tensor: Tensor, mesh: Mesh, what: str) -> None:
    """Inside `verify_ranks`, raise LocalTensorError on every rank if a plain tensor is not the same on all of them."""
    if not _verifying or mesh.size == 1 or comm.rank() not in mesh:
        return
    if tensor.is_meta or tensor.layout is not torch.strided:
        return
    plain = tensor.detach().cpu().resolve_conj().resolve_neg().contiguous().reshape(-1)
    digest = hashlib.blake2b(plain.view(torch.uint8).numpy().data, digest_size=16).hexdigest()
    message = f"{tuple(tensor.shape)} {tensor.dtype} {digest}"
    group = comm.subgroup(sorted(mesh.ranks))
    first, *others = comm.gather_bytes(message.encode(), group, what="comparing plain tensors")
    different = [rank for rank, other in zip(group.ranks[1:], others, strict=True) if other != first]
    if different:
        raise LocalTensorError(
            f"{what} is a plain tensor that counts as replicated, but rank {group.ranks[0]} and rank "
            f"{join_first(different, 8)} hold different values in it: make it the same on all ranks, or a DTensor with "
            f"DTensor.from_local (at {source_line()})"
        )


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
