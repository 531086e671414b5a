"""Agreement of the ranks on the result of a step.

It uses its own process group, so that a step that sends too much or too little does not disturb it.
"""

from __future__ import annotations

import weakref
import zlib
from enum import StrEnum
from typing import Any

import torch
import torch.distributed as dist

__all__ = ["GOES_ON", "StepResult", "Witness", "forget_witness", "witness"]


class StepResult(StrEnum):
    """The result of one step.

    >>> str(StepResult.REFUSED)
    'refused'
    """

    RIGHT = "right"
    SKIPPED = "skipped"  # it uses the result of a refused step
    REFUSED = "refused"  # a typed error on all ranks
    BOTH_REFUSED = "both refused"  # torch refuses it, too
    ACCEPTED = "accepted"  # torch refuses it
    WRONG = "wrong"
    TORN = "torn"
    UNTYPED = "untyped"
    DIVERGED = "diverged"


GOES_ON = (StepResult.RIGHT, StepResult.SKIPPED, StepResult.REFUSED, StepResult.BOTH_REFUSED)


class Witness:
    """Agreement of the ranks on the result of a step."""

    def __init__(self, group: dist.ProcessGroup | None) -> None:
        self._group = group
        self.rank = 0 if group is None else dist.get_rank()
        self.size = 1 if group is None else dist.get_world_size()

    def agree(
        self, result: StepResult, error: str, digest: int, differences: dict[str, str | None]
    ) -> tuple[list[str], list[str]] | None:
        """Return the names that differ on any rank and those that are partial; None if the ranks disagree."""
        names = sorted(differences)
        if self._group is None:
            return [name for name in names if differences[name] is not None], [
                n for n in names if differences[n] is None
            ]
        differs = [name for name in names if differences[name] is not None]
        summary = torch.tensor(
            [zlib.crc32(f"{result} {error}".encode()), digest, bool(differs), len(names) > len(differs)]
        )
        gathered = [torch.empty_like(summary) for _ in range(self.size)]
        dist.all_gather(gathered, summary, group=self._group)
        if any(not torch.equal(other_summary[:1], summary[:1]) for other_summary in gathered):
            return None
        if any(not torch.equal(other_summary[1:2], summary[1:2]) for other_summary in gathered) and result in GOES_ON:
            return None
        if not any(int(other_summary[2]) or int(other_summary[3]) for other_summary in gathered):
            return [], []
        every = self.gather((differs, [name for name in names if differences[name] is None]))
        return sorted({name for listed, _ in every for name in listed}), sorted(
            {name for _, listed in every for name in listed}
        )

    def gather(self, value: Any) -> list[Any]:
        """Return the values of all ranks, by rank."""
        if self._group is None:
            return [value]
        gathered: list[Any] = [None] * self.size
        dist.all_gather_object(gathered, value, group=self._group)
        return gathered


_known: tuple[weakref.ref[Any], Witness] | None = None


def witness() -> Witness:
    """Return the witness of this process's world."""
    global _known
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return Witness(None)
    world = dist.group.WORLD
    if _known is None or _known[0]() is not world:
        _known = weakref.ref(world), Witness(dist.new_group(backend="gloo"))
    return _known[1]


def forget_witness() -> None:
    """Release the process group; gloo's threads must not outlive it."""
    global _known
    _known = None
