"""Context parallelism: attention on sequences that are sharded over ranks."""

from shardwright.parallel.context.style import ContextParallel

__all__ = ["ContextParallel"]
