"""`stats`: minimum, maximum, mean, standard deviation, NaN and Inf counts and a histogram of every tensor, streamed."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
from torch import Tensor

from shardwright.checkpoint import LazyTensor
from shardwright.cli.blocks import stored_order
from shardwright.cli.exit_codes import FOUND, OK
from shardwright.cli.moments import Histogram, Moments
from shardwright.cli.numbers import as_numbers
from shardwright.cli.opening import open_checkpoint
from shardwright.cli.progress import Advance, progress_bar
from shardwright.cli.report import Report, new_table
from shardwright.cli.selection import select_all
from shardwright.cli.text import plural, printable, shape_text
from shardwright.errors import UsageError

if TYPE_CHECKING:
    from rich.console import RenderableType

__all__ = ["StatsReport", "TensorStats", "tensor_stats"]

_BLOCK = 2 << 20  # bytes of a tensor at a time: as float64, with what is computed from them, up to forty times as many
_KEPT = 16 << 20  # bytes up to which a tensor is kept in memory for the second pass
_BARS = " ▁▂▃▄▅▆▇█"


@dataclass(frozen=True)
class TensorStats:
    """The statistics of a tensor; of complex numbers, those of their magnitudes.

    NaN and infinite values are counted, and left out of everything else. `minimum`, `maximum`, `mean` and `std` are
    None if nothing is left. `histogram` has the counts of equal intervals between minimum and maximum.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    elements: int
    minimum: float | int | None
    maximum: float | int | None
    mean: float | None
    std: float | None
    zeros: int
    nans: int
    infinities: int
    histogram: tuple[int, ...]


@dataclass(frozen=True)
class StatsReport(Report):
    """The statistics of some tensors of a checkpoint."""

    path: str
    tensors: tuple[TensorStats, ...]
    fail_on_nan: bool = False

    @property
    def exit_code(self) -> int:
        """1 if NaN or infinite values are to be reported and there are some."""
        bad = any(tensor.nans or tensor.infinities for tensor in self.tensors)
        return FOUND if bad and self.fail_on_nan else OK

    def render(self) -> Iterator[RenderableType]:
        """Yield a table with a row for each tensor."""
        columns = ("MIN", "MAX", "MEAN", "STD", "ZEROS", "NAN", "INF")
        table = new_table("NAME", "DTYPE", "SHAPE", *columns, "HISTOGRAM", right=columns)
        for tensor in self.tensors:
            numbers = (tensor.minimum, tensor.maximum, tensor.mean, tensor.std)
            table.add_row(
                printable(tensor.name),
                tensor.dtype,
                shape_text(tensor.shape),
                *map(_number, numbers),
                *(str(value) if value else "-" for value in (tensor.zeros, tensor.nans, tensor.infinities)),
                _bars(tensor.histogram),
            )
        yield table
        bad = [tensor for tensor in self.tensors if tensor.nans or tensor.infinities]
        if bad:
            yield f"{plural(len(bad), 'tensor')} with NaN or infinite values"


def tensor_stats(path: str, names: Sequence[str] = (), *, bins: int = 16, fail_on_nan: bool = False) -> StatsReport:
    """Return the statistics of the tensors that are named, or of all."""
    if not 1 <= bins <= 10_000:
        raise UsageError(f"--bins must be between 1 and 10000, got {bins}")
    with open_checkpoint(path) as opened:
        tensors = [opened[name] for name in select_all(opened, names)]
        total = sum(tensor.nbytes * (1 if tensor.nbytes <= _KEPT else 2) for tensor in tensors)
        with progress_bar("reading", total) as advance:
            return StatsReport(path, tuple(_stats(tensor, bins, advance) for tensor in tensors), fail_on_nan)


def _stats(tensor: LazyTensor[Tensor], bins: int, advance: Advance) -> TensorStats:
    moments = Moments()
    kept: list[npt.NDArray[Any]] = []
    for block in _blocks(tensor, advance):
        moments.add(block)
        if tensor.nbytes <= _KEPT:
            kept.append(block)
    counts: tuple[int, ...] = ()
    if moments.finite:
        histogram = Histogram(float(moments.minimum), float(moments.maximum), bins)
        for block in kept or _blocks(tensor, advance):
            histogram.add(block)
        counts = tuple(histogram.counts.tolist())
    return TensorStats(
        name=tensor.name,
        dtype=str(tensor.dtype).removeprefix("torch."),
        shape=tuple(tensor.shape),
        elements=tensor.numel(),
        minimum=moments.minimum,
        maximum=moments.maximum,
        mean=moments.mean,
        std=moments.std,
        zeros=moments.zeros,
        nans=moments.nans,
        infinities=moments.infinities,
        histogram=counts,
    )


def _blocks(tensor: LazyTensor[Tensor], advance: Advance) -> Iterator[npt.NDArray[Any]]:
    for _, block in stored_order(tensor, _BLOCK):
        numbers = as_numbers(block)
        yield np.abs(numbers) if numbers.dtype.kind == "c" else numbers
        advance(block.nbytes)


def _number(value: float | int | None) -> str:
    if value is None:
        return "-"
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def _bars(counts: Sequence[int]) -> str:
    highest = max(counts, default=0)
    return "".join(_BARS[-(-count * (len(_BARS) - 1) // highest)] for count in counts) if highest else ""
