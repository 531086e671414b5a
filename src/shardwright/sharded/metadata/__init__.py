"""Metadata of a ShardedTensor: shards, their owners and devices, tensor properties, and the specs that produce them."""

from shardwright.sharded.metadata.process_group import load_with_process_group
from shardwright.sharded.metadata.properties import MEM_FORMAT_ENCODING, TensorProperties
from shardwright.sharded.metadata.remote_device import RemoteDevice
from shardwright.sharded.metadata.shard import Shard
from shardwright.sharded.metadata.spec import (
    ChunkShardingSpec,
    EnumerableShardingSpec,
    LayoutShardingSpec,
    ShardingSpec,
    infer_sharding_spec,
)
from shardwright.sharded.metadata.tensor_metadata import ShardedTensorMetadata, ShardMetadata

__all__ = [
    "MEM_FORMAT_ENCODING",
    "ChunkShardingSpec",
    "EnumerableShardingSpec",
    "LayoutShardingSpec",
    "RemoteDevice",
    "Shard",
    "ShardMetadata",
    "ShardedTensorMetadata",
    "ShardingSpec",
    "TensorProperties",
    "infer_sharding_spec",
    "load_with_process_group",
]
