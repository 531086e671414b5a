"""The tensors that a conversion writes: those of an open checkpoint, mapped, selected and cast, read by windows."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from fnmatch import fnmatchcase
from typing import Any, NamedTuple, TypeAlias, final

import torch
from torch import Tensor

from shardwright.checkpoint import Checkpoint
from shardwright.checkpoint.format.split import boxes_of_range
from shardwright.comm.packing import bits
from shardwright.errors import ArgumentTypeError, CheckpointError, MappingError
from shardwright.interop.mapping import BoundMapping, MappedPiece, Padding
from shardwright.interop.mapping import Mapping as Rules
from shardwright.layout import Region

__all__ = ["CastTo", "ConversionSource", "OutputTensor"]

CastTo: TypeAlias = torch.dtype | str | Mapping[str, torch.dtype | str]

_MIN_REGION = 1 << 20  # bytes; smaller regions of a source are read together with what lies between them


class OutputTensor(NamedTuple):
    """A tensor to be written. `tied_to` is the name of an earlier one that is the same stored tensor."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    tied_to: str | None = None

    @property
    def nbytes(self) -> int:
        """The number of bytes."""
        return torch.Size(self.shape).numel() * self.dtype.itemsize


@final
class ConversionSource:
    """The tensors of an open checkpoint as a conversion writes them. `memory` bounds the bytes held at once."""

    def __init__(
        self,
        opened: Checkpoint,
        mapping: Rules | None,
        only: str | Sequence[str] | None,
        cast: CastTo | None,
        memory: int,
    ) -> None:
        self.opened = opened
        self._bound = None if mapping is None else mapping.bind({name: opened[name].shape for name in opened})
        self._window = max(1 << 20, memory // 4)  # a window, what it is made of, its cast copy, and what is written
        patterns = None if only is None else [only] if isinstance(only, str) else list(only)
        self.tensors: list[OutputTensor] = []
        written: dict[Any, str] = {}
        for name in opened if self._bound is None else self._bound.targets:
            if patterns is not None and not any(fnmatchcase(name, pattern) for pattern in patterns):
                continue
            shape, dtype, key = self._described(name)
            output = _cast_dtype(name, dtype, cast)
            first = written.setdefault((key, output), name)
            self.tensors.append(OutputTensor(name, shape, output, None if first == name else first))
        if not self.tensors:
            raise CheckpointError(f"{opened!r}: there is nothing to convert" + (f", only={only!r}" if only else ""))

    def windows(self, tensor: OutputTensor) -> Iterator[Tensor]:
        """Yield the elements of a tensor in row-major order, in flat pieces of bounded size."""
        region = Region.whole(tensor.shape)
        count = max(1, self._window // max(tensor.dtype.itemsize, self._stored_dtype(tensor.name).itemsize))
        for first in range(0, region.volume, count):
            boxes = boxes_of_range(region, first, min(first + count, region.volume))
            parts = [self._read(tensor.name, box).to(tensor.dtype).reshape(-1) for box in boxes]
            yield parts[0] if len(parts) == 1 else torch.cat([bits(part) for part in parts]).view(tensor.dtype)

    def _described(self, name: str) -> tuple[tuple[int, ...], torch.dtype, Any]:
        """Return the shape and dtype of an output, and a key that is equal for those made of the same elements."""
        stored = self._stored_as(name)
        if self._bound is None or stored is not None:
            lazy = self.opened[name if stored is None else stored]
            return tuple(lazy.shape), lazy.dtype, lazy.stored_name
        pieces = self._bound.pieces(name)
        dtypes = {piece.name: self.opened[piece.name].dtype for piece in pieces if isinstance(piece, MappedPiece)}
        if len(set(dtypes.values())) != 1:
            raise MappingError(f"{name!r} is made of tensors of different dtypes, or of none: {_listed(dtypes)}")
        key = tuple(
            (self.opened[piece.name].stored_name, piece.source, piece.target)
            if isinstance(piece, MappedPiece)
            else piece
            for piece in pieces
        )
        return self._bound.targets[name], next(iter(dtypes.values())), key

    def _stored_as(self, name: str) -> str | None:
        """Return the stored tensor that an output is; None if it is made of others."""
        return name if self._bound is None else self._bound.renamed(name)

    def _stored_dtype(self, name: str) -> torch.dtype:
        if self._bound is None:
            return self.opened[name].dtype
        return self.opened[self._bound.sources(name)[0]].dtype

    def _read(self, name: str, region: Region) -> Tensor:
        """Read a region of an output, in the stored dtype."""
        stored = self._stored_as(name)
        if self._bound is None or stored is not None:
            return self.opened[name if stored is None else stored][region.slices()]
        return _assemble(self.opened, self._bound, name, region, self._stored_dtype(name), self._window)


def _assemble(
    opened: Checkpoint, bound: BoundMapping, name: str, region: Region, dtype: torch.dtype, window: int
) -> Tensor:
    result = torch.empty(region.size, dtype=dtype)
    for piece in bound.pieces(name, region):
        if isinstance(piece, Padding):
            piece.fill(result, region)
            continue
        for dense in piece.dense(_MIN_REGION // dtype.itemsize):
            for part in dense.limited(window // dtype.itemsize):
                box = part.source.region
                part.copy(opened[part.name][box.slices()], result, box, region)
    return result


def _listed(dtypes: Mapping[str, torch.dtype]) -> str:
    return ", ".join(f"{name!r}: {dtype}" for name, dtype in dtypes.items())


def _cast_dtype(name: str, dtype: torch.dtype, cast: CastTo | None) -> torch.dtype:
    """Return the dtype in which a tensor is written: only floating point is cast."""
    if isinstance(cast, Mapping):
        cast = next((wanted for pattern, wanted in cast.items() if fnmatchcase(name, pattern)), None)
    if cast is None:
        return dtype
    wanted = getattr(torch, cast.removeprefix("torch."), None) if isinstance(cast, str) else cast
    if not isinstance(wanted, torch.dtype):
        raise ArgumentTypeError(f"cast must be a dtype, its name, or a mapping of patterns to dtypes, got {cast!r}")
    if not wanted.is_floating_point:
        raise ArgumentTypeError(f"cast must be a floating-point dtype, got {wanted}")
    return wanted if dtype.is_floating_point else dtype
