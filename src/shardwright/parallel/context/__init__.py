"""Context parallelism: attention on sequences that are sharded over ranks."""

from shardwright.parallel.context.install import ContextInstallation, decide_context
from shardwright.parallel.context.style import ContextParallel

__all__ = ["ContextInstallation", "ContextParallel", "decide_context"]
