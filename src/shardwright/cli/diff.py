"""`diff`: names, shapes, dtypes and values in which two checkpoints differ, the largest differences first."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeAlias

from torch import Tensor

from shardwright.checkpoint import Checkpoint, LazyTensor
from shardwright.cli.blocks import boxes, read_box
from shardwright.cli.differences import Tally, Tolerance
from shardwright.cli.exit_codes import FOUND, OK
from shardwright.cli.opening import open_checkpoint
from shardwright.cli.progress import Advance, progress_bar
from shardwright.cli.report import Report, new_table, plain
from shardwright.cli.selection import select_all
from shardwright.cli.text import plural, printable, shape_text
from shardwright.errors import UsageError
from shardwright.interop.mapping import Mapping as TensorMapping
from shardwright.layout import Region

if TYPE_CHECKING:
    from rich.console import RenderableType

__all__ = ["DiffReport", "compare_checkpoints"]

Lazy: TypeAlias = LazyTensor[Tensor]

_MAX_SHOWN = 50
_BLOCK = 8 << 20


@dataclass(frozen=True)
class NameDifference:
    """What a tensor is in the one checkpoint and in the other: its shape, or its dtype."""

    name: str
    a: str
    b: str


@dataclass(frozen=True)
class ValueDifference:
    """How the values of a tensor differ: how many elements, the largest difference, where that is, and the values."""

    name: str
    shape: tuple[int, ...]
    elements: int
    differing: int
    max_absolute: float
    max_relative: float
    index: tuple[int, ...]
    a: Any
    b: Any


@dataclass(frozen=True)
class DiffReport(Report):
    """Everything in which two checkpoints differ."""

    a: str
    b: str
    rtol: float
    atol: float
    tensors_compared: int
    only_in_a: tuple[str, ...]
    only_in_b: tuple[str, ...]
    shapes: tuple[NameDifference, ...]
    dtypes: tuple[NameDifference, ...]
    values: tuple[ValueDifference, ...]
    plain_values: tuple[NameDifference, ...]

    @property
    def differs(self) -> bool:
        """True if there is any difference."""
        return any((self.only_in_a, self.only_in_b, self.shapes, self.dtypes, self.values, self.plain_values))

    @property
    def exit_code(self) -> int:
        """1 if there is any difference."""
        return FOUND if self.differs else OK

    def render(self) -> Iterator[RenderableType]:
        """Yield each kind of difference, and a summary."""
        for names, where, other in ((self.only_in_a, "a", "b"), (self.only_in_b, "b", "a")):
            if names:
                path = printable(self.a if where == "a" else self.b)
                yield f"only in {where} ({path}): {plural(len(names), 'name')}, not in {other}"
                yield from (f"  {printable(name)}" for name in names[:_MAX_SHOWN])
                if len(names) > _MAX_SHOWN:
                    yield f"  … and {len(names) - _MAX_SHOWN} more"
        for kind, rows in (("SHAPE", self.shapes), ("DTYPE", self.dtypes), ("VALUE", self.plain_values)):
            if rows:
                table = new_table(kind, "A", "B")
                for row in rows:
                    table.add_row(printable(row.name), printable(row.a), printable(row.b))
                yield table
        if self.values:
            right = ("DIFFERING", "MAX ABS", "MAX REL")
            table = new_table("TENSOR", "SHAPE", *right, "AT", "A", "B", right=right)
            for value in self.values:
                table.add_row(
                    printable(value.name),
                    shape_text(value.shape),
                    f"{value.differing} of {value.elements}",
                    f"{value.max_absolute:.4g}",
                    f"{value.max_relative:.4g}",
                    shape_text(value.index),
                    _number(value.a),
                    _number(value.b),
                )
            yield table
        within = "" if Tolerance(self.rtol, self.atol).is_exact else f" within rtol {self.rtol:g}, atol {self.atol:g}"
        if not self.differs:
            yield f"equal{within}: {plural(self.tensors_compared, 'tensor')}"
        else:
            different = {row.name for row in (*self.shapes, *self.dtypes)} | {row.name for row in self.values}
            same = self.tensors_compared - len(different)
            yield f"different: of {plural(self.tensors_compared, 'tensor')} in both, {same} are equal{within}"


def compare_checkpoints(
    a: str,
    b: str,
    *,
    only: Sequence[str] = (),
    tolerance: Tolerance | None = None,
    mapping: TensorMapping | None = None,
    ignore_values: bool = False,
    ignore_dtypes: bool = False,
) -> DiffReport:
    """Compare two checkpoints: of any formats and layouts, `a` through a mapping if one is given.

    With `ignore_values`, plain values are not compared (through a mapping they never are); with `ignore_dtypes`, a
    dtype that differs is not a difference by itself.
    """
    tolerance = tolerance or Tolerance()
    if not (tolerance.rtol >= 0 and tolerance.atol >= 0 and math.isfinite(tolerance.rtol + tolerance.atol)):
        raise UsageError(f"tolerances must be numbers of 0 or more, got rtol {tolerance.rtol}, atol {tolerance.atol}")
    with open_checkpoint(a, mapping) as left, open_checkpoint(b) as right:
        names = select_all(dict.fromkeys([*left, *right]), only)
        both = [name for name in names if name in left and name in right]
        shapes = [name for name in both if left[name].shape != right[name].shape]
        comparable = [name for name in both if name not in set(shapes)]
        with progress_bar("comparing", sum(left[name].nbytes for name in comparable)) as advance:
            values = [_compare(left[name], right[name], tolerance, advance) for name in comparable]
        plain_values: tuple[NameDifference, ...] = ()
        if not (ignore_values or only or mapping):
            plain_values = _compare_plain(left.plain_values(), right.plain_values())
        return DiffReport(
            a=a,
            b=b,
            rtol=tolerance.rtol,
            atol=tolerance.atol,
            tensors_compared=len(both),
            only_in_a=tuple(name for name in names if name not in right),
            only_in_b=tuple(name for name in names if name not in left),
            shapes=tuple(
                NameDifference(name, shape_text(left[name].shape), shape_text(right[name].shape)) for name in shapes
            ),
            dtypes=() if ignore_dtypes else tuple(_dtypes(both, left, right)),
            values=tuple(sorted((value for value in values if value), key=lambda value: -value.max_absolute)),
            plain_values=plain_values,
        )


def _compare(a: Lazy, b: Lazy, tolerance: Tolerance, advance: Advance) -> ValueDifference | None:
    tally = Tally(tolerance)
    for box in boxes(Region.whole(a.shape), max(a.dtype.itemsize, b.dtype.itemsize), _BLOCK):
        block = read_box(a, box)
        tally.add(box, block, read_box(b, box))
        advance(block.nbytes)
    if tally.index is None or tally.pair is None:
        return None
    elements = math.prod(a.shape)
    largest = tally.largest, tally.largest_relative
    return ValueDifference(a.name, tuple(a.shape), elements, tally.differing, *largest, tally.index, *tally.pair)


def _dtypes(names: Sequence[str], left: Checkpoint, right: Checkpoint) -> Iterator[NameDifference]:
    for name in names:
        dtypes = [str(source[name].dtype).removeprefix("torch.") for source in (left, right)]
        if dtypes[0] != dtypes[1]:
            yield NameDifference(name, *dtypes)


def _compare_plain(a: Mapping[str, Any], b: Mapping[str, Any]) -> tuple[NameDifference, ...]:
    """Compare plain values: those of one side only count as different."""
    missing = "(missing)"
    rows = []
    for name in {**a, **b}:
        sides = [repr(side[name]) if name in side else missing for side in (a, b)]
        same = name in a and name in b and type(a[name]) is type(b[name]) and plain(a[name]) == plain(b[name])
        if not same:
            rows.append(NameDifference(name, *sides))
    return tuple(rows)


def _number(value: Any) -> str:
    return f"{value:.6g}" if isinstance(value, float) else str(value)
