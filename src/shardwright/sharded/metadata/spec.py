"""Sharding specs: how a tensor of any size is split into shards, and which ranks own them. No communication."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol, final

import torch
from torch import Tensor

from shardwright.errors import ArgumentTypeError, PlacementError, TilingError
from shardwright.layout import Layout, Mesh
from shardwright.layout.gc import gc_paused
from shardwright.sharded.metadata.properties import TensorProperties
from shardwright.sharded.metadata.remote_device import RemoteDevice
from shardwright.sharded.metadata.tensor_metadata import (
    ShardedTensorMetadata,
    ShardMetadata,
    check_disjoint,
    check_tiling,
)

__all__ = [
    "ChunkShardingSpec",
    "EnumerableShardingSpec",
    "LayoutShardingSpec",
    "Scatter",
    "ShardingSpec",
    "implement_shard",
    "infer_sharding_spec",
    "metadata_for",
]


class Scatter(Protocol):
    """The function behind `ShardingSpec.shard`."""

    def __call__(self, tensor: Tensor, spec: ShardingSpec, src_rank: int, process_group: Any) -> Any:
        """Return the ShardedTensor of this spec with the values that rank `src_rank` has."""


_scatter: list[Scatter] = []


def implement_shard(scatter: Scatter) -> None:
    """Set the function behind `ShardingSpec.shard`: it builds a ShardedTensor, which is defined in a layer above."""
    _scatter[:] = [scatter]


class ShardingSpec(ABC):
    """How tensors are sharded. Subclasses implement `build_metadata`; factories, `shard` and `reshard` accept them.

    >>> class FirstRowAlone(ShardingSpec):
    ...     def build_metadata(self, tensor_sizes, tensor_properties):
    ...         rows, *rest = tensor_sizes
    ...         first = ShardMetadata([0] * len(tensor_sizes), [1, *rest], "rank:0/cpu")
    ...         others = ShardMetadata([1, *[0] * len(rest)], [rows - 1, *rest], "rank:0/cpu")
    ...         return ShardedTensorMetadata([first, others], tensor_sizes, tensor_properties)
    >>> from shardwright import sharded
    >>> [shard.tensor.shape for shard in sharded.zeros(FirstRowAlone(), 4, 2).local_shards()]
    [torch.Size([1, 2]), torch.Size([3, 2])]
    """

    @abstractmethod
    def build_metadata(self, tensor_sizes: torch.Size, tensor_properties: TensorProperties) -> ShardedTensorMetadata:
        """Return the metadata of a tensor of this size: its shards, which must tile it, and their owners."""

    def shard(self, tensor: Tensor, src_rank: int = 0, process_group: Any = None) -> Any:
        """Scatter the tensor of rank `src_rank` and return the ShardedTensor; each rank receives only its own shards.

        Every rank of the group calls it with a tensor of the same size and dtype. Only the values of the source rank
        are used; other ranks may pass a meta tensor.

        >>> spec = ChunkShardingSpec(0, ["rank:0/cpu", "rank:0/cpu"])
        >>> [piece.tensor.tolist() for piece in spec.shard(torch.arange(3)).local_shards()]
        [[0, 1], [2]]
        """
        return _scatter[0](tensor, self, src_rank, process_group)


@final
@dataclass
class ChunkShardingSpec(ShardingSpec):
    """Chunks along one dimension, sized as by `torch.chunk`, one per placement; trailing chunks may be empty.

    >>> spec = ChunkShardingSpec(dim=0, placements=["rank:0/cpu", "rank:1/cpu"])
    >>> for shard in spec.build_metadata(torch.Size([5, 2]), TensorProperties()).shards_metadata:
    ...     print(shard)
    ShardMetadata(shard_offsets=[0, 0], shard_sizes=[3, 2], placement=rank:0/cpu)
    ShardMetadata(shard_offsets=[3, 0], shard_sizes=[2, 2], placement=rank:1/cpu)
    """

    dim: int
    placements: list[RemoteDevice]

    def __init__(self, dim: int, placements: Iterable[Any]) -> None:
        if isinstance(dim, bool) or not isinstance(dim, int):
            raise ArgumentTypeError(f"ChunkShardingSpec: dim must be an int, got {dim!r}")
        self.dim = dim
        self.placements = [RemoteDevice.of(placement) for placement in placements]
        if not self.placements:
            raise PlacementError("ChunkShardingSpec: placements must not be empty")

    def build_metadata(self, tensor_sizes: torch.Size, tensor_properties: TensorProperties) -> ShardedTensorMetadata:
        """Return the chunks of a tensor of this size."""
        ndim, count = len(tensor_sizes), len(self.placements)
        if not -ndim <= self.dim < ndim:
            raise PlacementError(
                f"ChunkShardingSpec: dim {self.dim} is out of range for a tensor of size {list(tensor_sizes)}"
            )
        dim = self.dim % ndim
        global_size = list(tensor_sizes)
        extent = global_size[dim]
        step = -(-extent // count)
        shards = []
        with gc_paused():
            for number, placement in enumerate(self.placements):
                start = min(number * step, extent)
                offsets, sizes = [0] * ndim, global_size.copy()
                offsets[dim], sizes[dim] = start, min(step, extent - start)
                shards.append(ShardMetadata(offsets, sizes, placement))
        return ShardedTensorMetadata(shards, tensor_sizes, tensor_properties)


@final
@dataclass
class EnumerableShardingSpec(ShardingSpec):
    """An explicit list of shards: any boxes, any number per rank, as long as they tile the tensor.

    >>> spec = EnumerableShardingSpec([ShardMetadata([0], [3], "rank:0/cpu"), ShardMetadata([3], [2], "rank:1/cpu")])
    >>> spec.build_metadata(torch.Size([6]), TensorProperties())
    Traceback (most recent call last):
    shardwright.errors.TilingError: gap: nothing holds [5:6] of [0:6]
    """

    shards: list[ShardMetadata] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.shards = list(self.shards)
        check_disjoint(self.shards)

    def build_metadata(self, tensor_sizes: torch.Size, tensor_properties: TensorProperties) -> ShardedTensorMetadata:
        """Return the listed shards, which must tile a tensor of this size."""
        check_tiling(self.shards, tensor_sizes)
        return ShardedTensorMetadata(list(self.shards), tensor_sizes, tensor_properties)


@final
@dataclass(frozen=True)
class LayoutShardingSpec(ShardingSpec):
    """The regions of a `Layout`: a mesh and its placements, as for a DTensor. Two `Shard` placements give a grid.

    If several ranks hold a region (`Replicate`), the first of them owns it: a ShardedTensor has no replicas. Empty
    regions are left out. `device` is the device of the shards; by default it is the device type of a DeviceMesh.

    >>> from shardwright import Mesh, Shard
    >>> grid = LayoutShardingSpec(Mesh((2, 2)), [Shard(0), Shard(1)])
    >>> [str(shard.region) for shard in grid.build_metadata(torch.Size([4, 6]), TensorProperties()).shards_metadata]
    ['[0:2, 0:3]', '[0:2, 3:6]', '[2:4, 0:3]', '[2:4, 3:6]']
    """

    mesh: Mesh
    placements: tuple[Any, ...]
    order: tuple[int | str, ...] | None = None
    device: torch.device = field(default=torch.device("cpu"))

    def __init__(
        self, mesh: Any, placements: Iterable[Any], order: Iterable[int | str] | None = None, device: Any = None
    ) -> None:
        device_type = getattr(mesh, "device_type", "cpu") if device is None else device
        put = object.__setattr__
        put(self, "mesh", Mesh.of(mesh))
        put(self, "placements", tuple(placements))
        put(self, "order", None if order is None else tuple(order))
        put(self, "device", torch.device(device_type))

    def build_metadata(self, tensor_sizes: torch.Size, tensor_properties: TensorProperties) -> ShardedTensorMetadata:
        """Return the regions of a tensor of this size."""
        layout = Layout(self.mesh, self.placements, tensor_sizes, self.order)
        if layout.is_partial:
            raise PlacementError(
                f"LayoutShardingSpec: {layout} is partial, but shards hold complete values: use Shard(dim)"
            )
        shards = [
            ShardMetadata(region.offset, region.size, RemoteDevice.of(f"rank:{ranks[0]}/{self.device}"))
            for region, ranks in layout.regions()
        ]
        return ShardedTensorMetadata(shards, tensor_sizes, tensor_properties)


def metadata_for(spec: ShardingSpec, size: Sequence[int], properties: TensorProperties) -> ShardedTensorMetadata:
    """Call `spec.build_metadata` and validate the result, because users may write their own specs."""
    if not isinstance(spec, ShardingSpec):
        raise ArgumentTypeError(f"{type(spec).__name__} is not a sharded.ShardingSpec")
    metadata = spec.build_metadata(torch.Size(size), properties)
    if not isinstance(metadata, ShardedTensorMetadata):
        raise ArgumentTypeError(
            f"{type(spec).__name__}.build_metadata must return a ShardedTensorMetadata, got {type(metadata).__name__}"
        )
    if tuple(metadata.size) != tuple(size):
        raise TilingError(
            f"{type(spec).__name__}.build_metadata returned shards for size {list(metadata.size)}, but was called "
            f"with size {list(size)}"
        )
    metadata.validate()
    return replace(metadata, tensor_properties=properties)


def infer_sharding_spec(shards_metadata: Sequence[ShardMetadata], size: Sequence[int]) -> ShardingSpec:
    """Return a spec for these shards: a `ChunkShardingSpec` if they are chunks, else an `EnumerableShardingSpec`.

    >>> chunks = [ShardMetadata([0], [3], "rank:0/cpu"), ShardMetadata([3], [2], "rank:1/cpu")]
    >>> infer_sharding_spec(chunks, [5])
    ChunkShardingSpec(dim=0, placements=[RemoteDevice('rank:0/cpu'), RemoteDevice('rank:1/cpu')])
    """
    shards = list(shards_metadata)
    placements = [shard.placement for shard in shards]
    if shards and size and all(placement is not None for placement in placements):
        sharded = [dim for dim in range(len(size)) if any(shard.shard_sizes[dim] != size[dim] for shard in shards)]
        if len(sharded) > 1:
            return EnumerableShardingSpec(shards)
        for dim in sharded or range(len(size)):  # one shard: any dimension fits
            spec = ChunkShardingSpec(dim, placements)
            if spec.build_metadata(torch.Size(size), TensorProperties()).shards_metadata == shards:
                return spec
    return EnumerableShardingSpec(shards)
