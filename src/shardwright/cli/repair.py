"""`repair`: restore what is damaged in a checkpoint from other copies of the same tensors."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from shardwright import checkpoint
from shardwright.cli.exit_codes import FOUND, OK
from shardwright.cli.opening import no_checkpoint
from shardwright.cli.progress import progress_callback
from shardwright.cli.report import Report
from shardwright.cli.text import plural, printable
from shardwright.errors import NotACheckpointError

if TYPE_CHECKING:
    from rich.console import RenderableType

__all__ = ["RepairResult", "repair_checkpoint"]


@dataclass(frozen=True)
class RepairResult(Report):
    """What was repaired, and what is still damaged."""

    path: str
    intact: bool
    repaired: dict[str, int]
    remaining: tuple[str, ...]
    dry_run: bool

    @property
    def exit_code(self) -> int:
        """1 if something is still damaged."""
        return OK if self.intact else FOUND

    def render(self) -> Iterator[RenderableType]:
        """Yield a line for each file that was repaired and each place that was not."""
        path, verb = printable(self.path), "would be repaired" if self.dry_run else "repaired"
        for file, blocks in self.repaired.items():
            source = f"{plural(blocks, 'block')} from other copies" if blocks else "without other copies"
            yield f"{path}: {printable(file)} {verb}, {source if file != 'manifest.json' else 'from another copy'}"
        yield from (f"{path}: {printable(place)}" for place in self.remaining)
        if self.intact and not self.repaired:
            yield f"{path}: intact, nothing to repair"


def repair_checkpoint(path: str, sources: Sequence[str], *, dry_run: bool = False) -> RepairResult:
    """Repair a checkpoint from others."""
    try:
        with progress_callback(f"verifying {printable(path)}") as progress:
            report = checkpoint.repair(path, sources, dry_run=dry_run, progress=progress)
    except NotACheckpointError as error:
        raise no_checkpoint(path, error) from error
    repaired = {each.file: each.blocks for each in report.repaired}
    return RepairResult(path, bool(report), repaired, tuple(map(str, report.remaining)), dry_run)
