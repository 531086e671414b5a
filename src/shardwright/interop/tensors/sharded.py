"""Convert between PyTorch's ShardedTensor, metadata and specs and ours, without copies or communication.

They mean the same. PyTorch's is stricter about memory (contiguous shards only) and about the offsets of empty shards,
and builds the metadata of a tensor from its spec.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.distributed._shard.metadata import ShardMetadata as TheirShardMetadata
from torch.distributed._shard.sharded_tensor.api import ShardedTensor as TheirShardedTensor
from torch.distributed._shard.sharded_tensor.metadata import ShardedTensorMetadata as TheirMetadata
from torch.distributed._shard.sharded_tensor.metadata import TensorProperties as TheirProperties
from torch.distributed._shard.sharded_tensor.shard import Shard as TheirShard
from torch.distributed._shard.sharding_spec.api import EnumerableShardingSpec as TheirList
from torch.distributed._shard.sharding_spec.api import ShardingSpec as TheirSpec
from torch.distributed._shard.sharding_spec.chunk_sharding_spec import ChunkShardingSpec as TheirChunks
from torch.distributed.remote_device import _remote_device

from shardwright import comm
from shardwright.errors import ArgumentTypeError, ShardError, UnsupportedError
from shardwright.sharded import (
    ChunkShardingSpec,
    EnumerableShardingSpec,
    RemoteDevice,
    Shard,
    ShardedTensor,
    ShardedTensorBase,
    ShardedTensorMetadata,
    ShardingSpec,
    ShardMetadata,
    TensorProperties,
)
from shardwright.sharded.base.checks import refuse_nested
from shardwright.tensor import DTensor

__all__ = [
    "from_torch_metadata",
    "from_torch_sharded_tensor",
    "from_torch_spec",
    "to_torch_metadata",
    "to_torch_sharded_tensor",
    "to_torch_spec",
]

T = TypeVar("T")


def to_torch_sharded_tensor(tensor: ShardedTensor, process_group: Any = None) -> TheirShardedTensor:
    """Convert a ShardedTensor to PyTorch's: the same shards, memory and autograd history, without communication.

    The process group is that of the tensor, unless given. Specs that PyTorch does not have become
    `EnumerableShardingSpec`s.

    >>> import shardwright as sw
    >>> _ = sw.init_device_mesh("cpu", (1,))
    >>> table = sw.sharded.ones(sw.sharded.ChunkShardingSpec(0, ["rank:0/cpu"]), 4)
    >>> made = to_torch_sharded_tensor(table)
    >>> type(made).__module__, made.local_tensor().data_ptr() == table.local_tensor().data_ptr()
    ('torch.distributed._shard.sharded_tensor.api', True)
    """
    if not isinstance(tensor, ShardedTensor):
        raise ArgumentTypeError(
            f"to_torch_sharded_tensor: expected a shardwright ShardedTensor, got {type(tensor).__name__}"
        )
    group = tensor._process_group if process_group is None else process_group
    if group is None and comm.world().process_group is None:
        raise UnsupportedError(
            "to_torch_sharded_tensor: PyTorch's ShardedTensor needs a process group: call "
            "torch.distributed.init_process_group or shardwright.init_device_mesh first"
        )
    refuse_nested(tensor, "to_torch_sharded_tensor")
    local = {number: shard.tensor for number, shard in zip(_local_rows(tensor), tensor.local_shards(), strict=True)}
    for number, shard in local.items():
        if isinstance(shard, ShardedTensorBase | DTensor) or not shard.is_contiguous():
            raise UnsupportedError(
                f"to_torch_sharded_tensor: shard {number} must be a plain contiguous tensor, got one that is "
                f"{_describe_tensor(shard)}: "
                "use sharded.flatten_sharded_tensors for nested shards, and contiguous() for others"
            )
    spec, checked = _spec_and_metadata(tensor, local)

    def make() -> TheirShardedTensor:
        # PyTorch validates the metadata, and then builds its own from the spec. They differ for empty chunks, which it
        # places outside the tensor, where its validation would reject them.
        built = spec.build_metadata(checked.size, checked.tensor_properties)
        shards = [TheirShard(shard, built.shards_metadata[number]) for number, shard in local.items()]
        return TheirShardedTensor._init_from_local_shards_and_global_metadata(
            shards, checked, process_group=group, sharding_spec=spec
        )

    return _or_shard_error(make)


def from_torch_sharded_tensor(tensor: TheirShardedTensor) -> ShardedTensor:
    """Convert PyTorch's ShardedTensor to ours: the same shards, memory and autograd history, without communication.

    >>> import shardwright as sw
    >>> _ = sw.init_device_mesh("cpu", (1,))
    >>> theirs = to_torch_sharded_tensor(sw.sharded.ones(sw.sharded.ChunkShardingSpec(0, ["rank:0/cpu"]), 3))
    >>> from_torch_sharded_tensor(theirs).gather()
    tensor([1., 1., 1.])
    """
    if not isinstance(tensor, TheirShardedTensor):
        raise ArgumentTypeError(
            f"from_torch_sharded_tensor: expected PyTorch's ShardedTensor, got {type(tensor).__name__}"
        )
    metadata = from_torch_metadata(tensor.metadata())
    metadata.validate()
    spec = from_torch_spec(tensor.sharding_spec())
    result = ShardedTensor._bind(metadata, spec, (), comm.Group.of(tensor._process_group))
    shards = {_box(shard.metadata): shard.tensor for shard in tensor.local_shards()}
    their = dict(zip(map(id, metadata.shards_metadata), tensor.metadata().shards_metadata, strict=True))
    result._local_shards = [Shard(shards[_box(their[id(local)])], local) for local in result._local_metadata()]
    result._leaf = all(shard.is_leaf for shard in shards.values())
    return result


def to_torch_spec(spec: ShardingSpec, size: Any = None) -> TheirSpec:
    """Convert a spec to PyTorch's: chunks to chunks, others to the list of shards of a tensor of this size.

    >>> from shardwright.sharded import ChunkShardingSpec
    >>> to_torch_spec(ChunkShardingSpec(0, ["rank:0/cpu"]))
    ChunkShardingSpec(dim=0, placements=[rank:0/cpu])
    """
    if isinstance(spec, ChunkShardingSpec):
        return TheirChunks(spec.dim, [_to_placement(placement) for placement in spec.placements])
    if isinstance(spec, EnumerableShardingSpec):
        shards = spec.shards
    elif isinstance(spec, ShardingSpec) and size is not None:
        shards = spec.build_metadata(torch.Size(size), TensorProperties()).shards_metadata
    else:
        raise ArgumentTypeError(
            f"to_torch_spec: PyTorch has no {type(spec).__name__}: pass the size of the tensor to convert it to a list "
            "of shards"
        )
    return _or_shard_error(lambda: TheirList([_to_shard(shard) for shard in shards]))


def from_torch_spec(spec: TheirSpec) -> ShardingSpec:
    """Convert PyTorch's `ChunkShardingSpec` or `EnumerableShardingSpec` to ours.

    >>> from torch.distributed._shard.sharding_spec import ChunkShardingSpec
    >>> from_torch_spec(ChunkShardingSpec(0, ["rank:0/cpu"]))
    ChunkShardingSpec(dim=0, placements=[RemoteDevice('rank:0/cpu')])
    """
    if isinstance(spec, TheirChunks):
        return ChunkShardingSpec(spec.dim, spec.placements)  # type: ignore[arg-type]  # an int: both reject names
    if isinstance(spec, TheirList):
        return EnumerableShardingSpec([_from_shard(shard) for shard in spec.shards])
    raise ArgumentTypeError(f"from_torch_spec: cannot convert {type(spec).__name__}")


def to_torch_metadata(value: Any) -> Any:
    """Convert `ShardMetadata`, `TensorProperties` or `ShardedTensorMetadata` to PyTorch's.

    >>> to_torch_metadata(TensorProperties(dtype=torch.int8)).dtype
    torch.int8
    """
    match value:
        case ShardMetadata():
            return _to_shard(value)
        case TensorProperties(dtype=dtype, layout=layout, requires_grad=needs, memory_format=how, pin_memory=pinned):
            return TheirProperties(dtype, layout, needs, how, pinned)
        case ShardedTensorMetadata(shards_metadata=shards, size=size, tensor_properties=properties):
            return TheirMetadata([_to_shard(shard) for shard in shards], size, to_torch_metadata(properties))
        case _:
            raise ArgumentTypeError(
                f"to_torch_metadata: expected metadata of a ShardedTensor, got {type(value).__name__}"
            )


def from_torch_metadata(value: Any) -> Any:
    """Convert PyTorch's `ShardMetadata`, `TensorProperties` or `ShardedTensorMetadata` to ours.

    >>> from torch.distributed._shard.metadata import ShardMetadata
    >>> from_torch_metadata(ShardMetadata([0], [4], "rank:1/cpu"))
    ShardMetadata(shard_offsets=[0], shard_sizes=[4], placement=rank:1/cpu)
    """
    match value:
        case TheirShardMetadata():
            return _from_shard(value)
        case TheirProperties(dtype=dtype, layout=layout, requires_grad=needs, memory_format=how, pin_memory=pinned):
            return TensorProperties(dtype, layout, needs, how, pinned)
        case TheirMetadata(shards_metadata=shards, size=size, tensor_properties=properties):
            inside = [_inside(_from_shard(shard), size) for shard in shards]
            return ShardedTensorMetadata(inside, torch.Size(size), from_torch_metadata(properties))
        case _:
            raise ArgumentTypeError(
                f"from_torch_metadata: expected metadata of PyTorch's ShardedTensor, got {type(value).__name__}"
            )


def _spec_and_metadata(tensor: ShardedTensor, local: dict[int, Tensor]) -> tuple[TheirSpec, TheirMetadata]:
    """Return spec and metadata that PyTorch accepts, in the order of ours."""
    metadata = tensor.metadata()
    properties = to_torch_metadata(metadata.tensor_properties)
    owners = tensor._table.ranks.tolist()
    shards = []
    for number, (shard, owner) in enumerate(zip(metadata.shards_metadata, owners, strict=True)):
        placement = shard.placement or RemoteDevice.of(f"rank:{owner}")
        # PyTorch requires the device with its index; ours may be without one.
        placement = placement.on(local[number].device) if number in local else placement
        shards.append(ShardMetadata(shard.shard_offsets, shard.shard_sizes, placement))
    if not shards:
        raise UnsupportedError(
            f"to_torch_sharded_tensor: {tensor!r} has no shards, but PyTorch's needs at least one: reshard it with a "
            "ChunkShardingSpec, whose chunks may be empty"
        )
    shards = [_acceptable(shard) for shard in shards]
    spec = tensor.sharding_spec()
    their_spec = to_torch_spec(
        ChunkShardingSpec(spec.dim, [shard.placement for shard in shards])
        if isinstance(spec, ChunkShardingSpec)
        else EnumerableShardingSpec(shards)
    )
    return their_spec, TheirMetadata([_to_shard(shard) for shard in shards], metadata.size, properties)


def _acceptable(shard: ShardMetadata) -> ShardMetadata:
    """Move an empty shard to the origin: elsewhere PyTorch may report an overlap."""
    if not shard.region.is_empty:
        return shard
    return ShardMetadata([0] * len(shard.shard_offsets), shard.shard_sizes, shard.placement)


def _inside(shard: ShardMetadata, size: Any) -> ShardMetadata:
    """Move an empty shard inside the tensor: PyTorch places empty trailing chunks outside of it."""
    if not shard.region.is_empty:
        return shard
    offsets = [min(offset, extent) for offset, extent in zip(shard.shard_offsets, size, strict=True)]
    return ShardMetadata(offsets, shard.shard_sizes, shard.placement)


def _local_rows(tensor: ShardedTensor) -> list[int]:
    rows: list[int] = (tensor._table.ranks == comm.rank()).nonzero()[0].tolist()
    return rows


def _box(shard: Any) -> tuple[tuple[int, ...], tuple[int, ...]]:
    return tuple(shard.shard_offsets), tuple(shard.shard_sizes)


def _to_shard(shard: ShardMetadata) -> TheirShardMetadata:
    placement = None if shard.placement is None else _to_placement(shard.placement)
    return TheirShardMetadata(list(shard.shard_offsets), list(shard.shard_sizes), placement)


def _from_shard(shard: TheirShardMetadata) -> ShardMetadata:
    return ShardMetadata(shard.shard_offsets, shard.shard_sizes, shard.placement)


def _to_placement(placement: RemoteDevice) -> _remote_device:
    return _remote_device(str(placement))


def _describe_tensor(shard: Tensor) -> str:
    if isinstance(shard, ShardedTensorBase | DTensor):
        return f"itself a {type(shard).__name__}"
    return f"of sizes {list(shard.shape)} with strides {list(shard.stride())}"


def _or_shard_error(make: Callable[[], T]) -> T:
    try:
        return make()
    except (ValueError, RuntimeError) as error:
        raise ShardError(f"cannot create PyTorch's ShardedTensor: {error}") from error
