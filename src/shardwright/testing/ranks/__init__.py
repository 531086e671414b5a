"""Rank processes for tests: a pool of local processes that share a gloo process group, and the outcome of each."""

from shardwright.testing.ranks.outcome import Died, Hung, Outcome, Raised, Returned
from shardwright.testing.ranks.pool import RankPool, on_ranks, outcomes, run_ranks

__all__ = ["Died", "Hung", "Outcome", "Raised", "RankPool", "Returned", "on_ranks", "outcomes", "run_ranks"]
