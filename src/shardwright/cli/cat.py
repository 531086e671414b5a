"""`cat`: the values of a tensor, or of a part of it. Only what is shown is read."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import product
from typing import IO, TYPE_CHECKING, Any, BinaryIO

import torch
from torch import Tensor

from shardwright.checkpoint import Checkpoint, LazyTensor
from shardwright.cli.blocks import boxes
from shardwright.cli.indices import Selection, split_name
from shardwright.cli.opening import open_checkpoint
from shardwright.cli.report import Report
from shardwright.cli.text import printable, shape_text
from shardwright.errors import UsageError
from shardwright.layout import Region

if TYPE_CHECKING:
    from rich.console import RenderableType

__all__ = ["ValueReport", "ValuesReport", "read_values", "write_raw", "write_rows"]

_MAX_SHOWN = 1000  # elements up to which all are shown
_EDGE = 3  # otherwise, the first and last of each dimension
_MAX_JSON = 1_000_000
_ROWS = 1 << 20  # bytes of rows that are written as text at a time


@dataclass(frozen=True)
class ValueReport(Report):
    """A plain value of a checkpoint."""

    name: str
    value: Any

    def render(self) -> Iterator[RenderableType]:
        """Yield the value."""
        yield printable(self.value if isinstance(self.value, str) else repr(self.value))


@dataclass(frozen=True)
class ValuesReport(Report):
    """Values of a tensor as nested lists; `skipped` has the dimensions of which only the ends are in them."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    values: Any
    skipped: tuple[int, ...] = ()

    def render(self) -> Iterator[RenderableType]:
        """Yield the values as text, and what they are."""
        yield "\n".join(_lines(self.values, len(self.shape), self.skipped))
        yield f"{self.dtype} {shape_text(self.shape)}"


def read_values(path: str, wanted: str, *, as_json: bool = False) -> Report:
    """Return the values under `NAME` or `NAME[slice]`, of a tensor or a plain value.

    Of a part of more than a thousand elements, only the ends of long dimensions, unless it is for JSON.
    """
    with open_checkpoint(path) as opened:
        values = opened.plain_values()
        if wanted in values and wanted not in opened:
            return ValueReport(wanted, values[wanted])
        tensor, selection = _selected(opened, wanted)
        dtype = str(tensor.dtype).removeprefix("torch.")
        if as_json and selection.numel > _MAX_JSON:
            raise UsageError(
                f"{wanted} has {selection.numel} elements, and JSON of at most {_MAX_JSON} is written; name a slice, "
                "or use --raw"
            )
        if as_json or selection.numel <= _MAX_SHOWN:
            return ValuesReport(wanted, dtype, selection.shape, as_list(tensor[selection.index()]))
        skipped = tuple(dim for dim, extent in enumerate(selection.shape) if extent > 2 * _EDGE)
        return ValuesReport(wanted, dtype, selection.shape, as_list(_edges(tensor, selection)), skipped)


def write_rows(path: str, wanted: str, stream: IO[str]) -> None:
    """Write all values of a tensor (or of a slice) as text, a line for each row of its last dimension."""
    with open_checkpoint(path) as opened:
        tensor, selection = _selected(opened, wanted)
        digits = 17 if tensor.dtype.itemsize > 4 else 9  # as many as tell all numbers apart
        if not selection.shape:
            stream.write(f"{_number(as_list(tensor[selection.index()]), digits)}\n")
            return
        written = 0  # elements of the row that is being written
        for box in boxes(Region.whole(selection.shape), tensor.dtype.itemsize, _ROWS):
            block = tensor[selection.index(box)]
            for row in as_list(block.reshape(-1, block.shape[-1])):
                stream.write(" " * bool(written) + " ".join(_number(value, digits) for value in row))
                written += len(row)
                if written == selection.shape[-1]:
                    stream.write("\n")
                    written = 0


def write_raw(path: str, wanted: str, stream: BinaryIO) -> None:
    """Write the bytes of a tensor (or of a slice): row-major, little-endian, a few megabytes at a time."""
    with open_checkpoint(path) as opened:
        tensor, selection = _selected(opened, wanted)
        for box in boxes(Region.whole(selection.shape), tensor.dtype.itemsize):
            block = tensor[selection.index(box)].contiguous()
            stream.write(block.reshape(-1).view(torch.uint8).numpy().data)


def as_list(tensor: Tensor) -> Any:
    """Return the values of a tensor as nested lists of Python's numbers; of packed dtypes, their bytes.

    >>> as_list(torch.tensor([1.5, 2.0], dtype=torch.float8_e5m2))
    [1.5, 2.0]
    """
    if tensor.dtype.is_floating_point and tensor.dtype.itemsize == 1:
        packed = "_x2" in str(tensor.dtype)
        tensor = tensor.view(torch.uint8) if packed else tensor.to(torch.float32)
    return tensor.tolist()


def _selected(opened: Checkpoint, wanted: str) -> tuple[LazyTensor[Tensor], Selection]:
    name, index = split_name(wanted, opened)
    tensor = opened[name]
    return tensor, Selection.of(index, tensor.shape, wanted)


def _edges(tensor: LazyTensor[Tensor], selection: Selection) -> Tensor:
    """Read the first and last few of every long dimension."""
    shape = selection.shape
    parts = [[(0, _EDGE), (n - _EDGE, _EDGE)] if n > 2 * _EDGE else [(0, n)] for n in shape]
    result = torch.empty([sum(size for _, size in dim) for dim in parts], dtype=tensor.dtype)
    for corner in product(*(range(len(dim)) for dim in parts)):
        chosen = [dim[which] for dim, which in zip(parts, corner, strict=True)]
        box = Region([offset for offset, _ in chosen], [size for _, size in chosen])
        place = tuple(
            slice(which * _EDGE, which * _EDGE + size) for which, (_, size) in zip(corner, chosen, strict=True)
        )
        result[place] = tensor[selection.index(box)]
    return result


def _lines(values: Any, ndim: int, skipped: Sequence[int]) -> Iterator[str]:
    """Yield the lines of nested lists, with aligned columns and `...` where values were left out."""
    if ndim == 0:
        yield _number(values)
        return
    flat = values
    for _ in range(ndim - 1):
        flat = [value for row in flat for value in row]
    width = max((len(_number(value)) for value in flat), default=0)

    def rows(node: list[Any], dim: int) -> list[str]:
        if dim == ndim - 1:
            cells = [_number(value).rjust(width) for value in node]
            if dim in skipped:
                cells.insert(_EDGE, "...")
            return [f"[{', '.join(cells)}]"]
        blocks = [rows(below, dim + 1) for below in node]
        if dim in skipped:
            blocks.insert(_EDGE, ["..."])
        lines = []
        for number, block in enumerate(blocks):
            for at, line in enumerate(block):
                is_first, is_last = number == at == 0, at == len(block) - 1
                end = "," if is_last and number < len(blocks) - 1 and block != ["..."] else ""
                lines.append(("[" if is_first else " ") + line + end)
        if lines:
            lines[-1] += "]"
        return lines or ["[]"]

    yield from rows(values, 0)


def _number(value: Any, digits: int = 6) -> str:
    return f"{value:.{digits}g}" if isinstance(value, float) else str(value)
