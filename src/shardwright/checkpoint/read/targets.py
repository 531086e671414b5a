"""Where what is read goes: parts of the caller's tensors, each filled from the chunks that hold it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from shardwright.checkpoint.format.manifest import Manifest
from shardwright.checkpoint.plan.find import Finder, Part
from shardwright.checkpoint.read.file import Destination
from shardwright.checkpoint.read.match import Wanted
from shardwright.checkpoint.state.values import DTYPES
from shardwright.errors import CorruptionError
from shardwright.layout import Region

__all__ = ["Target", "by_chunk", "by_file", "check_bools", "targets_of"]


class Target(NamedTuple):
    """A tensor that holds `region` of the stored tensor of this number, and is to be filled; `name` is the caller's."""

    name: str
    number: int
    tensor: Tensor
    region: Region
    stored: torch.dtype


def targets_of(wanted: Sequence[Wanted], manifest: Manifest) -> list[Target]:
    """What is to be filled; memory that several names share is filled once."""
    found: list[Target] = []
    seen: set[tuple[int, int]] = set()
    for name, leaf, number in wanted:
        if (id(leaf), number) not in seen:
            seen.add((id(leaf), number))
            stored = DTYPES[manifest.tensors.dtypes[number]]
            found += [Target(name, number, part.tensor, part.region, stored) for part in leaf.parts]
    return found


def by_file(targets: Iterable[Target], finder: Finder) -> dict[int, list[Destination]]:
    """What comes from the file of each rank."""
    found: dict[int, list[Destination]] = {}
    for target in targets:
        for part in finder.parts(target.number, target.region):
            found.setdefault(part.rank, []).append(_destination(part, target))
    return found


def by_chunk(targets: Iterable[Target], finder: Finder) -> dict[tuple[int, int], list[Destination]]:
    """What comes from each chunk of each file."""
    found: dict[tuple[int, int], list[Destination]] = {}
    for target in targets:
        for part in finder.parts(target.number, target.region):
            found.setdefault((part.rank, part.chunk), []).append(_destination(part, target))
    return found


def _destination(part: Part, target: Target) -> Destination:
    return Destination(part, target.tensor, target.region, target.stored)


def check_bools(targets: Iterable[Target]) -> None:
    """Sees that every byte of a bool is 0 or 1: others have right checksums if they were so written, and mislead."""
    for target in targets:
        tensor = target.tensor
        if target.stored == tensor.dtype == torch.bool and tensor.numel() and int(tensor.view(torch.uint8).max()) > 1:
            raise CorruptionError(f"tensor {target.name!r} is of truths, and holds bytes that are neither 0 nor 1")
