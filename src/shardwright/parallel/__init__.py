"""Train in parallel: batches, plans and parallel models."""

from shardwright.parallel.batch import shard_batch

__all__ = ["shard_batch"]
