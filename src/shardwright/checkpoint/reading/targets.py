"""Where what is read goes: parts of the caller's tensors, each filled from the chunks that hold it."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from shardwright.checkpoint.format.locate import ChunkLocator
from shardwright.checkpoint.format.manifest import Manifest
from shardwright.checkpoint.format.values import DTYPES
from shardwright.checkpoint.reading.data_reader import Destination
from shardwright.checkpoint.reading.match import TensorMatch
from shardwright.errors import CorruptionError
from shardwright.layout import Region

__all__ = ["Target", "by_file", "check_bools", "targets_of"]


class Target(NamedTuple):
    """A tensor that holds `region` of the stored tensor of this number, and is to be filled; `name` is the caller's.

    `is_straight` is that of a `Destination`.
    """

    name: str
    number: int
    tensor: Tensor
    region: Region
    stored: torch.dtype
    is_straight: bool = False


def targets_of(wanted: Sequence[TensorMatch], manifest: Manifest) -> list[Target]:
    """What is to be filled."""
    dtypes = manifest.tensors.dtypes
    return [
        Target(name, number, tensor, region, DTYPES[dtypes[number]], leaf.is_straight and leaf.dtype == dtypes[number])
        for name, leaf, number in wanted
        for region, tensor in leaf.parts
    ]


def by_file(targets: Iterable[Target], locator: ChunkLocator) -> dict[int, list[Destination]]:
    """What comes from the file of each rank."""
    found: defaultdict[int, list[Destination]] = defaultdict(list)
    for _, number, tensor, frame, stored, is_straight in targets:
        for part in locator.parts(number, frame):
            found[part.rank].append(Destination(part, tensor, frame, stored, is_straight))
    return found


def check_bools(targets: Iterable[Target]) -> None:
    """Sees that every byte of a bool is 0 or 1: others have right checksums if they were so written, and mislead."""
    for name, _, tensor, *_ in [target for target in targets if target.stored == torch.bool]:
        if tensor.dtype == torch.bool and tensor.numel() and int(tensor.view(torch.uint8).max()) > 1:
            raise CorruptionError(f"tensor {name!r} is of truths, and holds bytes that are neither 0 nor 1")
