"""Clean up the steps under a root: remove those that a policy does not keep, and what failed saves left behind."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import final

from shardwright.checkpoint.manage.catalog import StepCatalog
from shardwright.checkpoint.manage.steps import Steps
from shardwright.errors import CheckpointError, StorageError

__all__ = ["Removal", "clean_up"]


@final
@dataclass(frozen=True)
class Removal:
    """A step, or a file in it, that is to be removed: why, its size in bytes, and the error if it could not be.

    >>> Removal(100, "runs/7/step-00000100", "not kept", 8192).error is None
    True
    """

    step: int
    path: str
    reason: str
    nbytes: int
    error: str | None = None


def clean_up(steps: Steps, catalog: StepCatalog, *, dry_run: bool) -> list[Removal]:
    """Remove what the policy of the catalog does not keep and leftovers of failed saves; return what was removed.

    The newest valid step is always kept. Steps in use stay, and so do files that no save has created. With `dry_run`,
    return the same, and remove nothing.
    """
    removals = []
    for step in steps.without_manifest():
        if _is_abandoned(steps, step):
            remove = partial(steps.remove, step, if_version="")
            removals.append(_removal(steps, step, "its save did not complete", None if dry_run else remove))
    for step, version in catalog.expired().items():
        remove = partial(steps.remove, step, if_version=version)
        removals.append(_removal(steps, step, "not kept by the rules", None if dry_run else remove))
    removed = {removal.step for removal in removals}
    for step in steps.committed():
        if step not in removed:
            removals += _leftovers(steps, step, dry_run)
    return sorted(removals, key=lambda removal: (removal.step, removal.path))


def _is_abandoned(steps: Steps, step: int) -> bool:
    try:
        return steps.is_abandoned(step)
    except StorageError:  # unknown: it stays
        return False


def _removal(steps: Steps, step: int, reason: str, remove: Callable[[], None] | None) -> Removal:
    nbytes, error = steps.size(step), None
    try:
        if remove is not None:
            remove()
    except StorageError as failure:
        error = str(failure)
    return Removal(step, steps.path(step), reason, nbytes, error)


def _leftovers(steps: Steps, step: int, dry_run: bool) -> list[Removal]:
    """Remove the files of failed saves in the directory of a valid step."""
    try:
        files = steps.leftovers(step) if dry_run else steps.remove_leftovers(step)
    except (StorageError, CheckpointError):  # it is in use or corrupted: its files stay
        return []
    folder = steps.path(step)
    return [Removal(step, os.path.join(folder, name), "left by a failed save", size) for name, size in files.items()]
