"""Operators on ShardedTensors: shard by shard, and the sharded linear and embedding."""

from shardwright.sharded.ops import (
    attributes,
    compare,
    draw,
    embedding,
    embedding_bag,
    linear,
    permute,
    pointwise,
    reduce,
)

__all__ = ["attributes", "compare", "draw", "embedding", "embedding_bag", "linear", "permute", "pointwise", "reduce"]
