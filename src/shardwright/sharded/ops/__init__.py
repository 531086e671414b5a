"""Operators on ShardedTensors: those that are computed shard by shard, and sharded linear and embedding."""

from shardwright.sharded.ops import attributes, compare, draw, embedding, embedding_bag, linear, pointwise, reduce, turn

__all__ = ["attributes", "compare", "draw", "embedding", "embedding_bag", "linear", "pointwise", "reduce", "turn"]
