"""`remove`: remove a checkpoint, so that a crash leaves it whole or not a checkpoint."""

from __future__ import annotations

import os

from shardwright.checkpoint.background import wait_for_saves_to
from shardwright.checkpoint.location import as_storage, location_id
from shardwright.checkpoint.manage.steps import remove_checkpoint, version_of
from shardwright.errors import ArgumentTypeError, NotACheckpointError
from shardwright.storage import Calls, LocalStorage

__all__ = ["remove"]


def remove(path: str | os.PathLike[str]) -> None:
    """Remove a checkpoint, even a damaged one: its manifest first, then its data, then the directory.

    Only files that a save created are removed; a directory with other files stays, with these files. Raise
    `StorageBusyError` while it is being saved, or read under the lock of a `CheckpointManager`, and
    `NotACheckpointError` if there is no manifest. To remove a step of a run, use `CheckpointManager.remove`, or this.

    >>> import os, tempfile, torch
    >>> from shardwright import checkpoint
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     checkpoint.save({"w": torch.ones(2)}, f"{folder}/run")
    ...     remove(f"{folder}/run")
    ...     os.listdir(folder)
    []
    """
    storage = as_storage(path)
    if not isinstance(storage, LocalStorage):
        raise ArgumentTypeError(f"remove needs a directory, got {storage!r}")
    wait_for_saves_to(location_id(storage))
    calls = Calls()
    if not version_of(calls, storage.path):
        raise NotACheckpointError(f"{storage!r} holds no checkpoint: there is no manifest.json")
    remove_checkpoint(storage, calls)
