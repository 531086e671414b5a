"""`convert`: write a checkpoint in another format, as `shardwright.interop.convert` does."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, cast

from shardwright.cli.opening import open_checkpoint
from shardwright.cli.report import Report
from shardwright.cli.scratch import check_output
from shardwright.cli.text import plural, printable, size
from shardwright.errors import UsageError
from shardwright.interop.conversion import convert
from shardwright.interop.mapping import Mapping

if TYPE_CHECKING:
    from rich.console import RenderableType

__all__ = ["ConvertReport", "convert_checkpoint"]

_FORMATS = ("hf", "dcp", "torch", "shardwright")


@dataclass(frozen=True)
class ConvertReport(Report):
    """A checkpoint that was written in another format."""

    source: str
    source_format: str
    output: str
    format: str
    tensors: int
    nbytes: int
    files: int

    def render(self) -> Iterator[RenderableType]:
        """Yield what was written."""
        contents = f"{plural(self.tensors, 'tensor')}, {size(self.nbytes)} in {plural(self.files, 'file')}"
        yield f"wrote {printable(self.output)} ({self.format}) from {self.source_format}: {contents}"


def convert_checkpoint(
    source: str,
    output: str,
    to: str,
    *,
    mapping: Mapping | None = None,
    only: Sequence[str] = (),
    cast_to: Sequence[str] = (),
    like: str | None = None,
    max_shard_size: str = "5GB",
) -> ConvertReport:
    """Write the tensors of a checkpoint in another format; nothing is at `output` unless all of it was written."""
    if to not in _FORMATS:
        raise UsageError(f"--to must be one of {', '.join(_FORMATS)}, got {to!r}")
    check_output(output)
    if like is not None and not os.path.isdir(like):
        raise UsageError(f"--like must name a folder, got {like!r}")
    with open_checkpoint(source) as opened:
        source_format = opened.format
    convert(
        source,
        output,
        to=cast(Literal["hf", "dcp", "torch", "shardwright"], to),
        mapping=mapping,
        only=list(only) or None,
        cast=_casts(cast_to),
        like=like,
        max_shard_size=max_shard_size,
    )
    with open_checkpoint(output) as written:
        tensors = {written[name].stored_name: written[name].nbytes for name in written}
        nbytes, files = sum(tensors.values()), len(written.files)
        return ConvertReport(source, source_format, output, written.format, len(tensors), nbytes, files)


def _casts(texts: Sequence[str]) -> str | dict[str, str] | None:
    """Return the dtype for all floating-point tensors, or dtypes by pattern, of `DTYPE` or `PATTERN=DTYPE`."""
    if not texts:
        return None
    if len(texts) == 1 and "=" not in texts[0]:
        return texts[0]
    if any("=" not in text for text in texts):
        raise UsageError("--cast must be one dtype, or PATTERN=DTYPE each time it is given")
    return {pattern: dtype for pattern, _, dtype in (text.rpartition("=") for text in texts)}
