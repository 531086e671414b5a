"""The tensors that a conversion writes: those of an open checkpoint, selected and cast, read by windows."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from fnmatch import fnmatchcase
from typing import NamedTuple, TypeAlias, final

import torch
from torch import Tensor

from shardwright.checkpoint import Checkpoint
from shardwright.checkpoint.format.split import boxes_of_range
from shardwright.comm.packing import bits
from shardwright.errors import ArgumentTypeError, CheckpointError
from shardwright.layout import Region

__all__ = ["CastTo", "ConversionSource", "OutputTensor"]

CastTo: TypeAlias = torch.dtype | str | Mapping[str, torch.dtype | str]


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

    def __init__(self, opened: Checkpoint, only: str | Sequence[str] | None, cast: CastTo | None, memory: int) -> None:
        self.opened = opened
        self._window = max(1 << 20, memory // 4)  # a window, what it is made of, its cast copy, and what is written
        patterns = None if only is None else [only] if isinstance(only, str) else list(only)
        self.tensors: list[OutputTensor] = []
        written: dict[tuple[int, torch.dtype], str] = {}
        for name, lazy in opened.items():
            if patterns is not None and not any(fnmatchcase(name, pattern) for pattern in patterns):
                continue
            dtype = _cast_dtype(name, lazy.dtype, cast)
            first = written.setdefault((lazy._number, dtype), name)
            self.tensors.append(OutputTensor(name, tuple(lazy.shape), dtype, None if first == name else first))
        if not self.tensors:
            raise CheckpointError(f"{opened!r}: there is nothing to convert" + (f", only={only!r}" if only else ""))

    def windows(self, tensor: OutputTensor) -> Iterator[Tensor]:
        """Yield the elements of a tensor in row-major order, in flat pieces of bounded size."""
        region, lazy = Region.whole(tensor.shape), self.opened[tensor.name]
        count = max(1, self._window // max(tensor.dtype.itemsize, lazy.dtype.itemsize))
        for first in range(0, region.volume, count):
            boxes = boxes_of_range(region, first, min(first + count, region.volume))
            parts = [lazy[box.slices()].to(tensor.dtype).reshape(-1) for box in boxes]
            yield parts[0] if len(parts) == 1 else torch.cat([bits(part) for part in parts]).view(tensor.dtype)


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
