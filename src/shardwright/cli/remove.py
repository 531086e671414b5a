"""`rm` and `gc`: remove checkpoints, or what the rules of a run do not keep. The newest valid step stays."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from shardwright import checkpoint
from shardwright.checkpoint import CheckpointManager, KeepBest
from shardwright.cli.exit_codes import OK, UNREADABLE
from shardwright.cli.opening import no_checkpoint, open_checkpoint, steps_under
from shardwright.cli.report import Report, new_table
from shardwright.cli.text import plural, printable, size
from shardwright.errors import NotACheckpointError, ShardwrightError, StorageError, UsageError

if TYPE_CHECKING:
    from rich.console import RenderableType

__all__ = ["RemovalReport", "collect_garbage", "parse_keep_best", "remove_checkpoints"]

_STEP = re.compile(r"step-([0-9]{8,})")


@dataclass(frozen=True)
class Removed:
    """A checkpoint or a file that was removed, or would be; `error` says why it could not be."""

    path: str
    reason: str
    nbytes: int
    error: str | None = None


@dataclass(frozen=True)
class RemovalReport(Report):
    """What was removed, or with `dry_run` would be."""

    removed: tuple[Removed, ...]
    nbytes: int
    dry_run: bool

    @property
    def exit_code(self) -> int:
        """3 if something could not be removed."""
        return UNREADABLE if any(removed.error for removed in self.removed) else OK

    def render(self) -> Iterator[RenderableType]:
        """Yield a table of what was removed, and the sum."""
        if self.removed:
            table = new_table("PATH", "SIZE", "REASON", right=("SIZE",))
            for removed in self.removed:
                reason = removed.reason if removed.error is None else f"failed: {removed.error}"
                table.add_row(printable(removed.path), size(removed.nbytes), printable(reason))
            yield table
        done = [removed for removed in self.removed if removed.error is None]
        verb = "would remove" if self.dry_run else "removed"
        yield f"{verb} {plural(len(done), 'item')}, {size(self.nbytes)}" if done else f"{verb} nothing"


def remove_checkpoints(paths: Sequence[str], *, force: bool = False, dry_run: bool = False) -> RemovalReport:
    """Remove checkpoints. Everything is checked first: if any cannot be removed, none is.

    The newest valid step of a run is refused without `force`, and so are other formats and folders of whole runs.
    """
    found = [_checked(path, force) for path in dict.fromkeys(os.path.abspath(path) for path in paths)]
    if dry_run:
        return _report(found, dry_run)
    removed = []
    for each in found:
        error = None
        try:
            checkpoint.remove(each.path)
        except ShardwrightError as failure:
            error = str(failure)
        removed.append(Removed(each.path, each.reason, each.nbytes, error))
    return _report(removed, dry_run)


def collect_garbage(
    root: str,
    *,
    keep_last: int | None = None,
    keep_every: int | None = None,
    keep_best: KeepBest | None = None,
    dry_run: bool = False,
) -> RemovalReport:
    """Remove the steps of a run that no rule keeps, and what failed saves left; without rules, only the latter."""
    if not os.path.isdir(root):
        raise NotACheckpointError(f"{root}: there is no such folder")
    with CheckpointManager(root, keep_last=keep_last, keep_every=keep_every, keep_best=keep_best) as manager:
        if not manager.describe():
            raise NotACheckpointError(f"{root} holds no steps of a run")
        found = manager.clean_up(dry_run=dry_run)
    return _report([Removed(each.path, each.reason, each.nbytes, each.error) for each in found], dry_run)


def parse_keep_best(text: str | None) -> KeepBest | None:
    """Parse `METRIC`, `METRIC:N` or `METRIC:N:max`.

    >>> parse_keep_best("accuracy:3:max")
    KeepBest(n=3, metric='accuracy', mode='max')
    """
    if text is None:
        return None
    metric, *rest = text.split(":")
    number, mode = (*rest, *("1", "min")[len(rest) :])[:2]
    if not metric or len(rest) > 2 or not number.isdecimal() or mode not in ("min", "max"):
        raise UsageError(f"--keep-best must be METRIC, METRIC:N or METRIC:N:max, such as loss:3:min, got {text!r}")
    return KeepBest(int(number), metric, mode)


def _checked(path: str, force: bool) -> Removed:
    """Return what is to be removed; raise if it must not be."""
    if steps_under(path):
        raise UsageError(f"{path} holds the steps of a run: name the steps to remove, or use shardwright gc")
    nbytes = _size(path)
    try:
        with open_checkpoint(path) as opened:
            kind = opened.format
    except NotACheckpointError as error:
        raise no_checkpoint(path, error) from error
    except ShardwrightError:
        kind = "shardwright"  # a damaged one
    if kind != "shardwright":
        raise UsageError(
            f"{path} is a {kind} checkpoint: rm removes only those that this library saved; delete its files"
        )
    step = _STEP.fullmatch(os.path.basename(path))
    if step and not force and CheckpointManager(os.path.dirname(path)).latest() == int(step[1]):
        raise UsageError(f"{path} is the newest valid step of its run, from which it would resume; --force removes it")
    return Removed(path, "named", nbytes)


def _size(path: str) -> int:
    try:
        with os.scandir(path) as entries:
            return sum(entry.stat(follow_symlinks=False).st_size for entry in entries if entry.is_file())
    except OSError as error:
        raise StorageError(f"{path}: {error.strerror}") from error


def _report(removed: Sequence[Removed], dry_run: bool) -> RemovalReport:
    nbytes = sum(each.nbytes for each in removed if each.error is None)
    return RemovalReport(tuple(removed), nbytes, dry_run)
