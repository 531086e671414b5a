"""Operators on ShardedTensors: those that are computed shard by shard, and sharded linear and embedding."""

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
