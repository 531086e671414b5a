"""`Shard`: a local tensor and its metadata."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, final

from torch import Tensor

from shardwright import comm
from shardwright.errors import ArgumentTypeError, ShardError
from shardwright.sharded.metadata.remote_device import RemoteDevice
from shardwright.sharded.metadata.tensor_metadata import ShardMetadata

__all__ = ["Shard"]


@final
@dataclass(eq=False, slots=True)
class Shard:
    """A local tensor and its `ShardMetadata`. (The placement of a DTensor is `shardwright.Shard`.)

    PyTorch's own `ShardMetadata` is accepted, too, and converted.

    >>> import torch
    >>> shard = Shard.from_tensor_and_offsets(torch.zeros(2, 4), [0, 4], rank=0)
    >>> shard.metadata
    ShardMetadata(shard_offsets=[0, 4], shard_sizes=[2, 4], placement=rank:0/cpu)
    """

    tensor: Tensor
    metadata: ShardMetadata

    def __post_init__(self) -> None:
        tensor: object = self.tensor  # whatever it was given
        metadata: object = self.metadata
        if not isinstance(tensor, Tensor):
            raise ArgumentTypeError(f"Shard: tensor must be a torch.Tensor, got {type(tensor).__name__}")
        if not isinstance(metadata, ShardMetadata):
            self.metadata = _converted(metadata)
        if list(self.tensor.shape) != self.metadata.shard_sizes:
            raise ShardError(
                f"Shard: the tensor has size {list(self.tensor.shape)}, but its metadata says "
                f"{self.metadata.shard_sizes} at offsets {self.metadata.shard_offsets}"
            )

    @classmethod
    def from_tensor_and_offsets(cls, tensor: Tensor, shard_offsets: Sequence[int], rank: int | None = None) -> Shard:
        """Return the shard at these offsets, owned by `rank` (default: this rank)."""
        if len(shard_offsets) != tensor.ndim:
            raise ShardError(
                f"Shard: a tensor of {tensor.ndim} dimensions needs as many offsets, got {list(shard_offsets)}"
            )
        placement = RemoteDevice.of(f"rank:{comm.rank() if rank is None else rank}").on(tensor.device)
        return cls(tensor, ShardMetadata(shard_offsets, tensor.shape, placement))


def _converted(metadata: Any) -> ShardMetadata:
    if all(hasattr(metadata, name) for name in ("shard_offsets", "shard_sizes", "placement")):
        return ShardMetadata(metadata.shard_offsets, metadata.shard_sizes, metadata.placement)
    raise ArgumentTypeError(f"Shard: metadata must be a sharded.ShardMetadata, got {type(metadata).__name__}")
