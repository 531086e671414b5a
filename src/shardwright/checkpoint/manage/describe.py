"""Describe the steps under a root: size, time and metrics of each, and whether it can be restored. No data is read."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import final

from shardwright.checkpoint.manage.catalog import StepCatalog
from shardwright.checkpoint.manage.record import Record
from shardwright.checkpoint.manage.steps import Steps
from shardwright.checkpoint.reading.contents import check_sizes
from shardwright.errors import (
    CorruptionError,
    FormatError,
    NotACheckpointError,
    StorageError,
    UnknownVersionError,
)

__all__ = ["StepInfo", "describe_steps"]


@final
@dataclass(frozen=True)
class StepInfo:
    """A step of a run: its directory, the bytes of its files, and its status.

    `status` is "valid" (the manifest is intact, and every file exists and has its size), "superseded" (the same, but
    the run went back to an earlier step), "corrupted", "unfinished" (its save did not complete), "in use" (it is being
    saved or removed), "newer format" or "unreadable"; `problem` says what is wrong. `time` (ISO 8601) and `metrics` are
    those that the manager recorded; a metric that is not a finite number is a string.

    >>> StepInfo(100, "runs/7/step-00000100", "valid", nbytes=8192).status
    'valid'
    """

    step: int
    path: str
    status: str
    problem: str = ""
    nbytes: int = 0
    time: str | None = None
    metrics: dict[str, float | str] = field(default_factory=dict)


def describe_steps(steps: Steps, catalog: StepCatalog) -> list[StepInfo]:
    """Return a description of every step that has a directory, in order."""
    superseded = set(catalog.superseded())
    found = [_committed(steps, step, step in superseded) for step in steps.committed()]
    found += [_without_manifest(steps, step) for step in steps.without_manifest()]
    return sorted(found, key=lambda info: info.step)


def _committed(steps: Steps, step: int, is_superseded: bool) -> StepInfo:
    path, nbytes = steps.path(step), steps.size(step)
    try:
        manifest = steps.manifest(step)
        check_sizes(steps.storage(step), manifest)
        record = Record.of(manifest)
    except UnknownVersionError as error:
        return StepInfo(step, path, "newer format", str(error), nbytes)
    except (CorruptionError, FormatError, NotACheckpointError) as error:
        return StepInfo(step, path, "corrupted", str(error), nbytes)
    except StorageError as error:
        return StepInfo(step, path, "unreadable", str(error), nbytes)
    status = "superseded" if is_superseded else "valid"
    problem = "the run went back to an earlier step" if is_superseded else ""
    if record is None:
        return StepInfo(step, path, status, problem, nbytes)
    return StepInfo(step, path, status, problem, nbytes, record.time, dict(record.metrics))


def _without_manifest(steps: Steps, step: int) -> StepInfo:
    path, nbytes = steps.path(step), steps.size(step)
    try:
        if steps.is_abandoned(step):
            return StepInfo(step, path, "unfinished", "it has no manifest: its save did not complete", nbytes)
    except StorageError as error:
        return StepInfo(step, path, "unreadable", str(error), nbytes)
    return StepInfo(step, path, "in use", "it is being saved or removed", nbytes)
