"""`verify`: check every byte of checkpoints, and name the tensors and bytes that are damaged."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from shardwright import checkpoint
from shardwright.checkpoint import CheckpointManager, Corruption
from shardwright.cli.exit_codes import FOUND, OK
from shardwright.cli.opening import no_checkpoint, steps_under
from shardwright.cli.progress import progress_callback
from shardwright.cli.report import Report, new_table
from shardwright.cli.text import plural, printable, size
from shardwright.errors import NotACheckpointError

if TYPE_CHECKING:
    from rich.console import RenderableType

__all__ = ["VerifyResult", "verify_checkpoints"]


@dataclass(frozen=True)
class CorruptedRange:
    """Something that is damaged: bytes `first` to `end` (exclusive) of a file, and the tensor that they belong to."""

    file: str
    problem: str
    tensor: str | None
    region: str | None
    first: int | None
    end: int | None


@dataclass(frozen=True)
class Verified:
    """A checkpoint that was verified; `stray` files are not part of it, and harmless."""

    path: str
    intact: bool
    save_id: str | None
    files: int
    nbytes: int
    unchecked_bytes: int
    damage: tuple[CorruptedRange, ...]
    damaged_tensors: tuple[str, ...]
    stray: tuple[str, ...]


@dataclass(frozen=True)
class VerifyResult(Report):
    """The checkpoints that were verified."""

    checkpoints: tuple[Verified, ...]

    @property
    def exit_code(self) -> int:
        """1 if any is damaged."""
        return OK if all(verified.intact for verified in self.checkpoints) else FOUND

    def render(self) -> Iterator[RenderableType]:
        """Yield a line for each checkpoint, and a table of what is damaged."""
        for verified in self.checkpoints:
            path = printable(verified.path)
            read = f"{plural(verified.files, 'file')}, {size(verified.nbytes)}"
            unchecked = f", of which {size(verified.unchecked_bytes)} have no checksum" * bool(verified.unchecked_bytes)
            if verified.intact:
                yield f"{path}: intact ({read}{unchecked})"
            else:
                yield f"{path}: damaged in {plural(len(verified.damage), 'place')} ({read} read{unchecked})"
                table = new_table("FILE", "BYTES", "TENSOR", "REGION", "PROBLEM")
                for row in verified.damage:
                    where = "" if row.first is None else f"{row.first}-{row.end}"
                    tensor, region = printable(row.tensor or ""), row.region or ""
                    table.add_row(printable(row.file), where, tensor, region, printable(row.problem))
                yield table
            for name in verified.stray:
                yield f"{path}: {printable(name)} is not part of the checkpoint"


def verify_checkpoints(paths: Sequence[str], *, threads: int = 2) -> VerifyResult:
    """Verify checkpoints; of the folder of a run, every step."""
    found: list[str] = []
    for path in paths:
        steps = steps_under(path)
        manager = CheckpointManager(path) if steps else None
        found += [path] if manager is None else [manager.path(step) for step in steps]
    return VerifyResult(tuple(_verify(path, threads) for path in found))


def _verify(path: str, threads: int) -> Verified:
    try:
        with progress_callback(f"verifying {printable(path)}") as progress:
            report = checkpoint.verify(path, progress, threads=threads)
    except NotACheckpointError as error:
        raise no_checkpoint(path, error) from error
    tensors = dict.fromkeys(corruption.tensor for corruption in report.corruptions if corruption.tensor is not None)
    return Verified(
        path=path,
        intact=bool(report),
        save_id=report.save_id,
        files=report.files,
        nbytes=report.nbytes,
        unchecked_bytes=report.unchecked,
        damage=tuple(map(_row, report.corruptions)),
        damaged_tensors=tuple(tensors),
        stray=report.stray,
    )


def _row(corruption: Corruption) -> CorruptedRange:
    region = None if corruption.region is None else str(corruption.region)
    return CorruptedRange(
        corruption.file, corruption.problem, corruption.tensor, region, corruption.first, corruption.end
    )
