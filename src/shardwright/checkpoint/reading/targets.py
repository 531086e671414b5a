"""The targets of a load: parts of the caller's tensors, each filled from the chunks that hold it."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from shardwright.checkpoint.format.locate import ChunkLocator
from shardwright.checkpoint.format.values import DTYPES
from shardwright.checkpoint.reading.contents import Contents
from shardwright.checkpoint.reading.data_reader import Destination
from shardwright.checkpoint.reading.match import TensorMatch
from shardwright.errors import CorruptionError
from shardwright.layout import Region

__all__ = ["Target", "by_file", "check_bools", "targets_of"]


class Target(NamedTuple):
    """A tensor to be filled, which holds `region` of the stored tensor `number`; `name` is the caller's.

    `is_straight` is that of `Destination`.
    """

    name: str
    number: int
    tensor: Tensor
    region: Region
    stored: torch.dtype
    is_straight: bool = False


def targets_of(matches: Sequence[TensorMatch], manifest: Contents) -> list[Target]:
    """Return the targets of these matches."""
    dtypes = manifest.tensors.dtypes
    return [
        Target(name, number, tensor, region, DTYPES[dtypes[number]], leaf.is_straight and leaf.dtype == dtypes[number])
        for name, leaf, number in matches
        for region, tensor in leaf.parts
    ]


def by_file(targets: Iterable[Target], locator: ChunkLocator) -> dict[int, list[Destination]]:
    """Return the destinations of the targets, by the rank of the file that they are read from."""
    destinations: defaultdict[int, list[Destination]] = defaultdict(list)
    for _, number, tensor, frame, stored, is_straight in targets:
        for part in locator.parts(number, frame):
            destinations[part.rank].append(Destination(part, tensor, frame, stored, is_straight))
    return destinations


def check_bools(targets: Iterable[Target]) -> None:
    """Check that bool tensors contain only 0 and 1: other bytes have valid checksums if they were saved like that."""
    for name, _, tensor, *_ in [target for target in targets if target.stored == torch.bool]:
        if tensor.dtype == torch.bool and tensor.numel() and int(tensor.view(torch.uint8).max()) > 1:
            raise CorruptionError(f"bool tensor {name!r} contains bytes other than 0 and 1")
