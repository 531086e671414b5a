"""Expert parallelism: experts on different ranks, and tokens sent to the ranks of their experts."""

from shardwright.parallel.experts.style import ExpertParallel

__all__ = ["ExpertParallel"]
