"""Metadata of a ShardedTensor: its shards with their owners, its size and its properties. No communication."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import Any, final

import numpy as np
import torch

from shardwright.errors import ShardError, TilingError
from shardwright.layout import Boxes, Gap, Outside, Overlap, Region, RegionTable
from shardwright.layout.integers import integers
from shardwright.layout.overlap import overlapping_pair
from shardwright.layout.region import coverage_of_boxes
from shardwright.sharded.metadata.properties import TensorProperties
from shardwright.sharded.metadata.remote_device import RemoteDevice

__all__ = ["ShardMetadata", "ShardedTensorMetadata", "check_disjoint", "check_tiling"]

_PLAIN = {int}


@final
class ShardMetadata:
    """A box of a tensor and the device that holds it: offsets, sizes, and a placement such as `rank:1/cuda:0`.

    >>> shard = ShardMetadata([0, 4], [2, 4], "rank:1/cuda:0")
    >>> shard.shard_offsets, shard.shard_sizes, shard.placement.rank()
    ([0, 4], [2, 4], 1)
    >>> shard.region
    Region[0:2, 4:8]
    """

    __slots__ = ("placement", "shard_offsets", "shard_sizes")

    shard_offsets: list[int]
    shard_sizes: list[int]
    placement: RemoteDevice | None

    def __init__(self, shard_offsets: Iterable[int], shard_sizes: Iterable[int], placement: Any = None) -> None:
        # A tensor may have hundreds of thousands of these: check all numbers at once if they are plain ints.
        is_sequence = isinstance(shard_offsets, (list, tuple)) and isinstance(shard_sizes, (list, tuple))
        numbers = [*shard_offsets, *shard_sizes] if is_sequence else []
        if not (is_sequence and set(map(type, numbers)) <= _PLAIN):
            shard_offsets, shard_sizes = integers(shard_offsets, "shard offsets"), integers(shard_sizes, "shard sizes")
            numbers = [*shard_offsets, *shard_sizes]
        self.shard_offsets, self.shard_sizes = offsets, sizes = list(shard_offsets), list(shard_sizes)
        self.placement = None if placement is None else RemoteDevice.of(placement)
        if len(offsets) != len(sizes):
            raise ShardError(f"shard offsets {offsets} and sizes {sizes}: both need one number per dimension")
        if numbers and min(numbers) < 0:
            raise ShardError(f"shard offsets {offsets}, sizes {sizes}: none may be negative")

    @property
    def region(self) -> Region:
        """Offsets and sizes as a `Region`."""
        return Region(self.shard_offsets, self.shard_sizes)

    def to_json(self) -> dict[str, Any]:
        """Return plain values for JSON.

        >>> ShardMetadata([0], [2], "rank:1/cpu").to_json()
        {'offsets': [0], 'sizes': [2], 'placement': 'rank:1/cpu'}
        """
        placement = None if self.placement is None else str(self.placement)
        return {"offsets": self.shard_offsets, "sizes": self.shard_sizes, "placement": placement}

    @classmethod
    def from_json(cls, value: dict[str, Any]) -> ShardMetadata:
        """Build the metadata from the output of `to_json`."""
        return cls(value["offsets"], value["sizes"], value["placement"])

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, ShardMetadata):
            return NotImplemented
        return (
            self.shard_offsets == other.shard_offsets
            and self.shard_sizes == other.shard_sizes
            and self.placement == other.placement
        )

    def __hash__(self) -> int:
        return hash((*self.shard_offsets, *self.shard_sizes, self.placement))

    def __repr__(self) -> str:
        return (
            f"ShardMetadata(shard_offsets={self.shard_offsets}, shard_sizes={self.shard_sizes}, "
            f"placement={self.placement})"
        )


@final
@dataclass
class ShardedTensorMetadata:
    """All shards of a tensor, its size and its properties. Identical on every rank, and stored in checkpoints.

    >>> shards = [ShardMetadata([0], [3], "rank:0/cpu"), ShardMetadata([3], [2], "rank:1/cpu")]
    >>> metadata = ShardedTensorMetadata(shards, torch.Size([5]))
    >>> metadata.validate()
    >>> ShardedTensorMetadata.from_json(metadata.to_json()) == metadata
    True
    """

    shards_metadata: list[ShardMetadata] = field(default_factory=list)
    size: torch.Size = field(default=torch.Size([]))
    tensor_properties: TensorProperties = field(default_factory=TensorProperties)

    def __post_init__(self) -> None:
        self.size = torch.Size(self.size)

    def validate(self) -> None:
        """Raise `TilingError` unless the shards tile the tensor without gap or overlap. O(n log n) for n shards.

        >>> ShardedTensorMetadata([ShardMetadata([0], [3], "rank:0/cpu")], torch.Size([5])).validate()
        Traceback (most recent call last):
        shardwright.errors.TilingError: gap: nothing holds [3:5] of [0:5]
        """
        check_tiling(self.shards_metadata, self.size)

    def table(self, owner: Callable[[RemoteDevice | None], int]) -> RegionTable:
        """Return the shards as arrays, with the rank that `owner` returns for each placement.

        >>> shards = [ShardMetadata([0], [3], "rank:7/cpu")]
        >>> ShardedTensorMetadata(shards, torch.Size([3])).table(lambda placement: placement.rank()).ranks.tolist()
        [7]
        """
        owner_of: dict[int, int] = {}  # by identity: equal placements are nearly always one object
        for shard in self.shards_metadata:
            if id(shard.placement) not in owner_of:
                owner_of[id(shard.placement)] = owner(shard.placement)
        ranks = np.array([owner_of[id(shard.placement)] for shard in self.shards_metadata], np.int64)
        return RegionTable(ranks, *_boxes(self.shards_metadata, len(self.size)))

    def to_json(self) -> dict[str, Any]:
        """Return plain values for JSON."""
        return {
            "shards": [shard.to_json() for shard in self.shards_metadata],
            "size": list(self.size),
            "properties": self.tensor_properties.to_json(),
        }

    @classmethod
    def from_json(cls, value: dict[str, Any]) -> ShardedTensorMetadata:
        """Build the metadata from the output of `to_json`."""
        shards = [ShardMetadata.from_json(shard) for shard in value["shards"]]
        return cls(shards, torch.Size(value["size"]), TensorProperties.from_json(value["properties"]))


def check_tiling(shards: Sequence[ShardMetadata], size: Sequence[int]) -> None:
    """Raise a `TilingError` that names the first overlap, gap or shard outside the tensor."""
    ndim = len(size)
    for number, shard in enumerate(shards):
        if len(shard.shard_sizes) != ndim:
            raise TilingError(
                f"shard {number} {_bounds_text(shard)} has {len(shard.shard_sizes)} dimensions, its tensor of size "
                f"{list(size)} has {ndim}"
            )
    coverage = coverage_of_boxes(Region.whole(size), *_boxes(shards, ndim))
    match coverage:
        case Overlap(region, first, second):
            raise _overlapping(shards, first, second, region)
        case Outside(_, index, parent):
            raise TilingError(f"outside: shard {index} {_bounds_text(shards[index])} is not inside {parent}")
        case Gap():
            raise TilingError(str(coverage))


def check_disjoint(shards: Sequence[ShardMetadata]) -> None:
    """Raise a `TilingError` if two shards overlap. Gaps are allowed: the size of the tensor is not known here."""
    ndims = sorted({len(shard.shard_sizes) for shard in shards})
    if len(ndims) > 1:
        raise TilingError(f"shards of one tensor must have the same number of dimensions, got {ndims}")
    if not shards:
        return
    boxes = _boxes(shards, len(shards[0].shard_sizes))
    around = Region.whole((boxes.offsets + boxes.sizes).max(axis=0).tolist())
    match coverage_of_boxes(around, *boxes):
        case Overlap(region, first, second):
            raise _overlapping(shards, first, second, region)
        case Gap():  # there may be an overlap after the gap
            if pair := overlapping_pair(boxes):
                first, second = pair
                raise _overlapping(shards, first, second, shards[first].region.intersect(shards[second].region))


def _boxes(shards: Sequence[ShardMetadata], ndim: int) -> Boxes:
    count = len(shards)  # fromiter: np.array takes three times as long for a list of lists
    offsets = chain.from_iterable([shard.shard_offsets for shard in shards])
    sizes = chain.from_iterable([shard.shard_sizes for shard in shards])
    return Boxes(
        np.fromiter(offsets, np.int64, count * ndim).reshape(count, ndim),
        np.fromiter(sizes, np.int64, count * ndim).reshape(count, ndim),
    )


def _overlapping(shards: Sequence[ShardMetadata], first: int, second: int, region: Region | None) -> TilingError:
    pair = f"shard {first} {_bounds_text(shards[first])} and shard {second} {_bounds_text(shards[second])}"
    return TilingError(f"overlap: {pair} both hold {region}")


def _bounds_text(shard: ShardMetadata) -> str:
    return f"{shard.region} on {shard.placement}" if shard.placement is not None else str(shard.region)
