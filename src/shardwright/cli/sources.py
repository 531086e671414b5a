"""The tensors of a checkpoint to read from: as they are stored, or as a mapping makes them, region by region."""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import prod

import torch
from torch import Tensor

from shardwright.checkpoint import Checkpoint, LazyTensor
from shardwright.cli.blocks import BUDGET, boxes, read_box
from shardwright.cli.selection import select_all
from shardwright.errors import UsageError
from shardwright.interop.mapping import SHIPPED, BoundMapping, MappedPiece, Mapping
from shardwright.layout import Region

__all__ = ["MappedTensor", "Source", "StoredTensor", "read_mapping", "sources_of"]


class Source(ABC):
    """A tensor that can be read by regions. `key` identifies its contents within the checkpoint."""

    name: str
    key: str
    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def nbytes(self) -> int:
        """The size of the tensor in bytes."""
        return prod(self.shape) * self.dtype.itemsize

    @abstractmethod
    def read(self, box: Region) -> Tensor:
        """Read a region."""

    def blocks(self, budget: int = BUDGET) -> Iterator[tuple[Region, Tensor]]:
        """Read all of it in row-major order, box by box."""
        for box in boxes(Region.whole(self.shape), self.dtype.itemsize, budget):
            yield box, self.read(box)


@dataclass(frozen=True)
class StoredTensor(Source):
    """A tensor as it is stored."""

    tensor: LazyTensor[Tensor]

    def __post_init__(self) -> None:
        fields = {"name": self.tensor.name, "key": self.tensor.stored_name, "dtype": self.tensor.dtype}
        self.__dict__.update(fields, shape=tuple(self.tensor.shape))

    def read(self, box: Region) -> Tensor:
        """Read a region."""
        return read_box(self.tensor, box)


@dataclass(frozen=True)
class MappedTensor(Source):
    """A tensor that a mapping makes of stored ones: only the regions that a region is made of are read."""

    opened: Checkpoint
    bound: BoundMapping
    target: str

    def __post_init__(self) -> None:
        sources = self.bound.sources(self.target)
        dtype = self.opened[sources[0]].dtype if sources else torch.float32
        fields = {"name": self.target, "key": self.target, "dtype": dtype}
        self.__dict__.update(fields, shape=tuple(self.bound.targets[self.target]))

    def read(self, box: Region) -> Tensor:
        """Read a region."""
        result = torch.zeros(box.size, dtype=self.dtype)
        for whole in self.bound.pieces(self.target, box):
            if not isinstance(whole, MappedPiece):
                continue  # padding is zero
            for piece in whole.limited(BUDGET // self.dtype.itemsize):
                source = self.opened[piece.name]
                if source.dtype != self.dtype:
                    raise UsageError(f"{self.target!r} is joined of {self.dtype} and {source.dtype}: {piece.name!r}")
                piece.copy(read_box(source, piece.source.region), result, piece.source.region, box)
        return result


def sources_of(opened: Checkpoint, only: Sequence[str] = (), mapping: Mapping | None = None) -> dict[str, Source]:
    """Return the tensors of a checkpoint by name, or what a mapping makes of them; with `only`, those selected."""
    if mapping is None:
        return {name: StoredTensor(opened[name]) for name in select_all(opened, only)}
    bound = mapping.bind({name: tuple(opened[name].shape) for name in opened})
    return {name: MappedTensor(opened, bound, name) for name in select_all(bound.targets, only)}


def read_mapping(text: str | None, sizes: Sequence[str]) -> Mapping | None:
    """Return the mapping that arguments name: a file of rules, or one that is shipped; sizes are `axis=length`."""
    if text is None:
        if sizes:
            raise UsageError("--size belongs to a mapping: name one with --mapping")
        return None
    lengths = dict(_axis_length(size) for size in sizes)
    if os.path.exists(text):
        with open(text, encoding="utf-8") as file:
            return Mapping(file.read(), **lengths)
    shipped = {name.lower(): rules for name, rules in SHIPPED.items()}
    if text.lower() in shipped:
        return Mapping(shipped[text.lower()], **lengths)
    raise UsageError(
        f"there is no file {text!r}, and no mapping of that name; shipped are {', '.join(sorted(shipped))}"
    )


def _axis_length(text: str) -> tuple[str, int]:
    axis, _, length = text.partition("=")
    if not axis or not length.isdecimal():
        raise UsageError(f"--size must be like d=128, got {text!r}")
    return axis, int(length)
