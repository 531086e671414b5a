"""The base class of ShardedTensor: local shards, metadata and group; operator lookup and calls shard by shard."""

from shardwright.sharded.base.tensor_base import ShardedTensorBase

__all__ = ["ShardedTensorBase"]
