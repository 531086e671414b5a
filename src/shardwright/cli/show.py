"""`show`: what a checkpoint holds, as a tree with dtypes, shapes, sizes and layouts; or one tensor and who holds it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch

from shardwright.checkpoint import LazyTensor
from shardwright.cli.opening import open_checkpoint
from shardwright.cli.patterns import fold_names
from shardwright.cli.report import Report, new_table
from shardwright.cli.selection import select_all
from shardwright.cli.text import count, number_ranges, plural, printable, shape_text, size
from shardwright.layout import Layout

if TYPE_CHECKING:
    from rich.console import RenderableType

__all__ = ["CheckpointReport", "TensorReport", "describe_checkpoint"]

_LONGEST_VALUE = 60


@dataclass(frozen=True)
class TensorRow:
    """A tensor, or several that differ in the numbers of their names only: `names` has them all."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    nbytes: int
    layout: str
    ranks: str
    names: int = 1
    same_as: str | None = None


@dataclass(frozen=True)
class CheckpointReport(Report):
    """The contents of a checkpoint."""

    path: str
    format: str
    save_id: str | None
    files: int
    file_bytes: int
    tensors: int
    elements: int
    nbytes: int
    dtypes: dict[str, int]
    rows: tuple[TensorRow, ...]
    values: dict[str, Any] = field(default_factory=dict)
    as_tree: bool = True

    def render(self) -> Iterator[RenderableType]:
        """Yield a heading, the tensors and the plain values."""
        dtypes = ", ".join(f"{name} {size(nbytes)}" for name, nbytes in self.dtypes.items())
        saved = f", save {self.save_id}" if self.save_id else ""
        yield f"{printable(self.path)}: {self.format} checkpoint{saved}"
        contents = f"{plural(self.tensors, 'tensor')}, {count(self.elements)} elements, {size(self.nbytes)}"
        stored = f" in {plural(self.files, 'file')}" if self.files else ""
        yield f"{contents}{stored}{f' ({dtypes})' if dtypes else ''}"
        if self.rows:
            yield ""
            yield _table(self.rows, self.as_tree)
        if self.values:
            yield ""
            values = new_table("VALUE", "")
            for name, value in self.values.items():
                values.add_row(printable(name), _brief(value))
            yield values


@dataclass(frozen=True)
class HoldingRow:
    """A region of a tensor, and the ranks that held it when it was saved; none if the format does not say."""

    offset: tuple[int, ...]
    size: tuple[int, ...]
    ranks: tuple[int, ...]


@dataclass(frozen=True)
class RangeRow:
    """Bytes of a file that hold some of a tensor."""

    file: str
    first: int
    end: int


@dataclass(frozen=True)
class TensorReport(Report):
    """One tensor: what it is, who held which region of it, and where its bytes are."""

    path: str
    name: str
    stored_name: str
    dtype: str
    shape: tuple[int, ...]
    elements: int
    nbytes: int
    layout: dict[str, Any] | None
    held: tuple[HoldingRow, ...]
    stored: tuple[RangeRow, ...]

    def render(self) -> Iterator[RenderableType]:
        """Yield a heading, a picture of the regions, and the files."""
        from shardwright.tensor import picture

        same = f" (the same tensor as {printable(self.stored_name)})" if self.stored_name != self.name else ""
        yield f"{printable(self.name)}{same}"
        yield f"{self.dtype} {shape_text(self.shape)}, {count(self.elements)} elements, {size(self.nbytes)}"
        yield ""
        if self.layout is not None:
            layout = Layout.from_json(self.layout)
            yield picture(layout, f"saved as {layout}")
        else:
            yield "saved as 1 box" if len(self.held) == 1 else f"saved as {len(self.held)} boxes"
            has_ranks = any(held.ranks for held in self.held)
            regions = new_table("REGION", *(["RANKS"] if has_ranks else []))
            for held in self.held:
                ends = (offset + extent for offset, extent in zip(held.offset, held.size, strict=True))
                ranges = (f"{first}:{end}" for first, end in zip(held.offset, ends, strict=True))
                regions.add_row(f"[{', '.join(ranges)}]", *([number_ranges(held.ranks)] if has_ranks else []))
            yield regions
        yield ""
        files = new_table("FILE", "BYTES", "SIZE", right=("SIZE",))
        for stored in self.stored:
            files.add_row(printable(stored.file), f"{stored.first}-{stored.end}", size(stored.end - stored.first))
        yield files


def describe_checkpoint(path: str, names: Sequence[str] = (), *, patterns: bool = False, flat: bool = False) -> Report:
    """Return the contents of a checkpoint, or of the names given; of a single tensor, all that is known of it."""
    with open_checkpoint(path) as opened:
        has_ranks = opened.format == "shardwright"  # in others, pieces are numbered by their files
        values = opened.plain_values()
        chosen = select_all([*opened, *(name for name in values if name not in opened)], names)
        if len(names) == 1 and chosen == list(names) and chosen[0] in opened:
            return _describe_tensor(path, opened[chosen[0]], has_ranks=has_ranks)
        tensors = {name: opened[name] for name in chosen if name in opened}
        rows = tuple(_rows(tensors, patterns=patterns, has_ranks=has_ranks))
        stored = {tensor.stored_name: tensor for tensor in tensors.values()}
        dtypes: Counter[str] = Counter()
        for tensor in stored.values():
            dtypes[_dtype(tensor)] += tensor.nbytes
        return CheckpointReport(
            path=path,
            format=opened.format,
            save_id=opened.save_id if has_ranks else None,
            files=len(opened.files),
            file_bytes=sum(opened.files.values()),
            tensors=len(stored),
            elements=sum(tensor.numel() for tensor in stored.values()),
            nbytes=sum(dtypes.values()),
            dtypes=dict(dtypes.most_common()),
            rows=rows,
            values={name: value for name, value in values.items() if name in set(chosen)},
            as_tree=not (flat or patterns),
        )


def _describe_tensor(path: str, tensor: LazyTensor[torch.Tensor], *, has_ranks: bool) -> TensorReport:
    layout = tensor.layout
    return TensorReport(
        path=path,
        name=tensor.name,
        stored_name=tensor.stored_name,
        dtype=_dtype(tensor),
        shape=tuple(tensor.shape),
        elements=tensor.numel(),
        nbytes=tensor.nbytes,
        layout=None if layout is None else layout.to_json(),
        held=tuple(
            HoldingRow(region.offset, region.size, ranks if has_ranks else ()) for region, ranks in tensor.holdings()
        ),
        stored=tuple(RangeRow(*stored) for stored in tensor.stored_ranges()),
    )


def _rows(tensors: Mapping[str, LazyTensor[torch.Tensor]], *, patterns: bool, has_ranks: bool) -> Iterator[TensorRow]:
    layouts: dict[Any, tuple[str, str]] = {}  # most tensors share a few

    def row(name: str, tensor: LazyTensor[torch.Tensor]) -> TensorRow:
        key = tensor.layout or tensor.stored_name
        if key not in layouts:
            layouts[key] = _layout_text(tensor, has_ranks)
        same_as = tensor.stored_name if tensor.stored_name != name else None
        return TensorRow(name, _dtype(tensor), tuple(tensor.shape), tensor.nbytes, *layouts[key], same_as=same_as)

    rows = {name: row(name, tensor) for name, tensor in tensors.items()}
    if not patterns:
        yield from rows.values()
        return
    keyed = [(name, (row.dtype, row.shape, row.layout, row.ranks, row.same_as is None)) for name, row in rows.items()]
    for pattern, members, _ in fold_names(keyed):
        first = rows[members[0]]
        same_as = first.same_as if len(members) == 1 else None
        yield TensorRow(
            name=pattern,
            dtype=first.dtype,
            shape=first.shape,
            nbytes=sum(rows[name].nbytes for name in members),
            layout=first.layout,
            ranks=first.ranks,
            names=len(members),
            same_as=same_as,
        )


def _layout_text(tensor: LazyTensor[torch.Tensor], has_ranks: bool) -> tuple[str, str]:
    """Return how a tensor was laid out, and over which ranks."""
    layout = tensor.layout
    if layout is None:
        held = tensor.holdings()
        boxes = f"{len(held)} boxes" if len(held) > 1 else "whole"
        return boxes, number_ranges(rank for _, ranks in held for rank in ranks) if has_ranks else ""
    placements = str(layout).partition("] ")[2]
    return placements, number_ranges(layout.mesh.ranks)


def _table(rows: Sequence[TensorRow], as_tree: bool) -> RenderableType:
    folded = any(row.names > 1 for row in rows)
    right = ("SIZE", "COUNT")
    table = new_table("NAME", *(["COUNT"] if folded else []), "DTYPE", "SHAPE", "SIZE", "LAYOUT", "RANKS", right=right)
    for depth, label, row, nbytes in _tree(rows) if as_tree else ((0, row.name, row, row.nbytes) for row in rows):
        name = "  " * depth + printable(label)
        if row is None:
            table.add_row(name, "", "", size(nbytes), style="dim")
            continue
        counts = [str(row.names)] if folded else []
        described = f"= {printable(row.same_as)}" if row.same_as else row.layout
        table.add_row(name, *counts, row.dtype, shape_text(row.shape), size(row.nbytes), described, row.ranks)
    return table


def _tree(rows: Sequence[TensorRow]) -> Iterator[tuple[int, str, TensorRow | None, int]]:
    """Yield depth, label, row (None for a container) and bytes of every line; containers of one entry are joined."""
    root: dict[str, Any] = {}
    for row in rows:
        node = root
        for part in row.name.split(".")[:-1]:
            below = node.setdefault(part, {})
            node = below if isinstance(below, dict) else node.setdefault(f"{part}.", {})
        last = row.name.rpartition(".")[2]
        node[last if last not in node else row.name] = row

    def lines(node: dict[str, Any], depth: int) -> Iterator[tuple[int, str, TensorRow | None, int]]:
        for label, below in node.items():
            while isinstance(below, dict) and len(below) == 1:
                ((part, below),) = below.items()
                label = f"{label}.{part}"
            if isinstance(below, TensorRow):
                yield depth, label, below, below.nbytes
            else:
                yield depth, label, None, _total(below)
                yield from lines(below, depth + 1)

    yield from lines(root, 0)


def _total(node: dict[str, Any]) -> int:
    """Return the bytes of all tensors below a container; those of a tensor with several names once."""
    return sum(
        (0 if below.same_as else below.nbytes) if isinstance(below, TensorRow) else _total(below)
        for below in node.values()
    )


def _dtype(tensor: LazyTensor[torch.Tensor]) -> str:
    return str(tensor.dtype).removeprefix("torch.")


def _brief(value: Any) -> str:
    text = printable(repr(value))
    return text if len(text) <= _LONGEST_VALUE else f"{text[: _LONGEST_VALUE - 1]}…"
