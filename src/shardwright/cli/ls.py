"""`ls`: the steps of a run, or the checkpoints in a folder: size, age, and whether each is valid."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import TYPE_CHECKING

from shardwright import checkpoint
from shardwright.checkpoint import CheckpointManager, StepInfo
from shardwright.cli.exit_codes import FOUND, OK
from shardwright.cli.report import Report, new_table
from shardwright.cli.text import age, plural, printable, size
from shardwright.errors import CheckpointError, NotACheckpointError, ShardwrightError, StorageError

if TYPE_CHECKING:
    from rich.console import RenderableType

__all__ = ["Listing", "list_checkpoints"]

_DAMAGED = ("corrupted", "unreadable")


@dataclass(frozen=True)
class Entry:
    """A checkpoint in a folder: `step` is None unless a manager saved it."""

    name: str
    path: str
    step: int | None
    status: str
    problem: str
    nbytes: int
    time: str | None
    age_seconds: float | None
    metrics: dict[str, float | str] = field(default_factory=dict)
    format: str = "shardwright"


@dataclass(frozen=True)
class Listing(Report):
    """The checkpoints in a folder."""

    root: str
    entries: tuple[Entry, ...]
    latest: int | None

    @property
    def exit_code(self) -> int:
        """1 if any checkpoint is damaged."""
        return FOUND if any(entry.status in _DAMAGED for entry in self.entries) else OK

    def render(self) -> Iterator[RenderableType]:
        """Yield a table with a row for each checkpoint, and what is wrong with those that are not valid."""
        metrics = sorted({name for entry in self.entries for name in entry.metrics})
        right = ("SIZE", "AGE", *metrics)
        table = new_table("NAME", "STATUS", "SIZE", "AGE", *metrics, right=right)
        for entry in self.entries:
            is_latest = entry.step is not None and entry.step == self.latest
            status = f"{entry.status}{', latest' if is_latest else ''}"
            if entry.format != "shardwright":
                status = f"{status} ({entry.format})"
            old = "" if entry.age_seconds is None else age(entry.age_seconds)
            values = [_metric(entry.metrics.get(name)) for name in metrics]
            table.add_row(printable(entry.name), status, size(entry.nbytes), old, *values)
        yield table
        yield f"{plural(len(self.entries), 'checkpoint')}, {size(sum(entry.nbytes for entry in self.entries))}"
        for entry in self.entries:
            if entry.problem:
                yield f"{printable(entry.name)}: {printable(entry.problem)}"


def list_checkpoints(root: str, now: datetime | None = None) -> Listing:
    """Return the steps of a run and other checkpoints directly under a folder; no data is read."""
    if not os.path.isdir(root):
        if os.path.lexists(root):
            raise NotACheckpointError(f"{root} is not a folder")
        raise NotACheckpointError(f"{root}: there is no such folder")
    now = now or datetime.now(UTC)
    manager = CheckpointManager(root)
    steps = manager.describe()
    entries = [_step_entry(info, now) for info in steps]
    managed = {os.path.basename(info.path) for info in steps}
    try:
        names = sorted(os.listdir(root))
    except OSError as error:
        raise StorageError(f"cannot list {root}: {error.strerror}") from error
    others = (_other_entry(root, name, now) for name in names if name not in managed)
    entries += [entry for entry in others if entry is not None]
    if not entries:
        raise NotACheckpointError(f"{root} holds no checkpoints")
    return Listing(root, tuple(entries), manager.latest())


def _step_entry(info: StepInfo, now: datetime) -> Entry:
    name = os.path.basename(info.path)
    old = _age(info.path if info.time is None else None, info.time, now)
    return Entry(
        name, info.path, info.step, info.status, info.problem, info.nbytes, info.time, old, metrics=info.metrics
    )


def _other_entry(root: str, name: str, now: datetime) -> Entry | None:
    """Return the entry of a folder that holds a checkpoint of another name; None if it does not."""
    path = os.path.join(root, name)
    if not os.path.isdir(path):
        return None
    status, problem, nbytes, kind = "valid", "", 0, "shardwright"
    try:
        with checkpoint.open(path) as opened:
            nbytes, kind = sum(opened.files.values()), opened.format
    except NotACheckpointError:
        return None
    except CheckpointError as error:
        status, problem = "corrupted", str(error)
    except ShardwrightError as error:
        status, problem = "unreadable", str(error)
    return Entry(name, path, None, status, problem, nbytes, None, _age(path, None, now), format=kind)


def _age(path: str | None, time: str | None, now: datetime) -> float | None:
    """Return the seconds since a time, or since a folder was last changed."""
    try:
        when = datetime.fromisoformat(time) if time else datetime.fromtimestamp(os.stat(path or "").st_mtime, UTC)
    except OSError:
        return None
    return (now - (when if when.tzinfo else when.replace(tzinfo=UTC))).total_seconds()


def _metric(value: float | str | None) -> str:
    return "" if value is None else printable(value) if isinstance(value, str) else f"{value:.6g}"
