"""The reads that fill mapped tensors: directly, where a piece is a box of its source in another order of dimensions.

Other pieces, such as rows that are permuted within heads, are read into a buffer, a few at a time, and copied from it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import NamedTuple, final

import torch
from torch import Tensor

from shardwright.checkpoint.format.locate import ChunkLocator
from shardwright.checkpoint.format.tensor_table import TensorTable
from shardwright.checkpoint.format.values import DTYPES
from shardwright.checkpoint.reading.mapped_entries import MappedEntries
from shardwright.checkpoint.reading.match import TensorMatch
from shardwright.checkpoint.reading.targets import Target
from shardwright.checkpoint.state.leaves import Part
from shardwright.interop.mapping import MappedPiece, Padding
from shardwright.layout import Region

__all__ = ["MappedReads", "assemble"]

_BUFFER = 64 << 20  # bytes of the buffer, unless `memory` bounds it
_MIN_REGION = 4 << 20  # bytes; smaller regions are read together with what lies between them, or through the buffer


class _Read(NamedTuple):
    """A piece to be read through the buffer, and the part of the target that it goes to."""

    name: str
    number: int
    piece: MappedPiece
    part: Part
    stored: torch.dtype

    @property
    def nbytes(self) -> int:
        return self.piece.source.region.volume * self.stored.itemsize


@final
class MappedReads:
    """The reads for these matches, whose tensors are made of others.

    `direct` has those that need no buffer. Padding is set to zero when the others are read.
    """

    def __init__(self, matches: Sequence[TensorMatch] = (), mapped: MappedEntries | None = None) -> None:
        self.direct: list[Target] = []
        self._buffered: list[_Read] = []
        self._padding: list[tuple[Padding, Part]] = []
        for name, leaf, number in matches:
            assert mapped is not None  # else no tensor is made of others
            for part in leaf.parts:
                for piece in mapped.pieces(number, part.region):
                    if isinstance(piece, Padding):
                        self._padding.append((piece, part))
                    else:
                        self._add(name, mapped.numbers[piece.name], piece, part, mapped.table)

    def _add(self, name: str, number: int, piece: MappedPiece, part: Part, table: TensorTable) -> None:
        stored = DTYPES[table.dtypes[number]]
        least = _MIN_REGION // stored.itemsize
        for dense in piece.dense(least):
            for each in dense.separated(least):
                view = each.target_as_source(part.tensor, part.region)
                if view is not None:
                    self.direct.append(Target(name, number, view, each.source.region, stored))
                else:
                    self._buffered.append(_Read(name, number, each, part, stored))

    @property
    def nbytes(self) -> int:
        """The number of bytes that are read through the buffer."""
        return sum(read.nbytes for read in self._buffered)

    def files(self, locator: ChunkLocator) -> set[int]:
        """Return the ranks of the files that are read through the buffer."""
        return {part.rank for read in self._buffered for part in locator.parts(read.number, read.piece.source.region)}

    def fill(self, fill: Callable[[Sequence[Target]], None], memory: int | None) -> None:
        """Read what needs the buffer with `fill`, as many pieces at a time as it holds, and set padding to zero."""
        budget = _BUFFER if memory is None else max(1 << 20, memory // 2)
        for batch in _batches(_limited(self._buffered, budget), budget):
            targets = [
                Target(
                    read.name,
                    read.number,
                    torch.empty(read.piece.source.region.size, dtype=read.stored),
                    read.piece.source.region,
                    read.stored,
                )
                for read in batch
            ]
            fill(targets)
            for read, target in zip(batch, targets, strict=True):
                read.piece.copy(target.tensor, read.part.tensor, target.region, read.part.region)
        for padding, part in self._padding:
            padding.fill(part.tensor, part.region)


def assemble(
    mapped: MappedEntries, number: int, region: Region, read: Callable[[int, Region], Tensor], memory: int = _BUFFER
) -> Tensor:
    """Return a region of a tensor that is made of others, each read by `read`, at most `memory` bytes at a time."""
    dtype = DTYPES[mapped.table.dtypes[number]]
    result = torch.empty(region.size, dtype=dtype)
    for piece in mapped.pieces(number, region):
        if isinstance(piece, Padding):
            piece.fill(result, region)
            continue
        for dense in piece.dense(_MIN_REGION // dtype.itemsize):
            for part in dense.limited(memory // dtype.itemsize):
                box = part.source.region
                part.copy(read(mapped.numbers[part.name], box), result, box, region)
    return result


def _limited(reads: Iterable[_Read], budget: int) -> Iterator[_Read]:
    for read in reads:
        for piece in read.piece.limited(budget // read.stored.itemsize):
            yield read._replace(piece=piece)


def _batches(reads: Iterable[_Read], budget: int) -> Iterator[list[_Read]]:
    batch: list[_Read] = []
    size = 0
    for read in reads:
        if batch and size + read.nbytes > budget:
            yield batch
            batch, size = [], 0
        batch.append(read)
        size += read.nbytes
    if batch:
        yield batch
