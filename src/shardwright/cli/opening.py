"""Open the checkpoint that an argument names, or say what is there instead."""

from __future__ import annotations

import os

from shardwright import checkpoint
from shardwright.checkpoint import Checkpoint, CheckpointManager
from shardwright.cli.text import plural
from shardwright.errors import NotACheckpointError, StorageError
from shardwright.interop.mapping import Mapping

__all__ = ["no_checkpoint", "open_checkpoint", "steps_under"]


def open_checkpoint(path: str, mapping: Mapping | None = None) -> Checkpoint:
    """Open a checkpoint, through a mapping if one is given; if there is none, raise an error that names the remedy."""
    try:
        return checkpoint.open(path, mapping=mapping)
    except NotACheckpointError as error:
        raise no_checkpoint(path, error) from error


def no_checkpoint(path: str, error: NotACheckpointError) -> NotACheckpointError:
    """Return the error to show for a path that holds no checkpoint."""
    if not os.path.lexists(path) and "://" not in path:
        return NotACheckpointError(f"{path}: there is no such file or folder")
    steps = steps_under(path)
    if steps:
        newest = CheckpointManager(path).path(steps[-1])
        return NotACheckpointError(
            f"{path} is not a checkpoint itself: it holds {plural(len(steps), 'step')} of a run. Name one, such as "
            f"{newest}, or list them with shardwright ls"
        )
    return NotACheckpointError(str(error))


def steps_under(path: str) -> list[int]:
    """Return the steps that a manager has saved under a path."""
    try:
        return CheckpointManager(path).steps()
    except StorageError:
        return []
