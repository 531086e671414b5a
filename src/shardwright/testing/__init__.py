"""Ranks to test on: a pool of local processes that share a gloo process group."""

from shardwright.testing.outcome import Died, Hung, Outcome, Raised, Returned
from shardwright.testing.pool import RankPool, on_ranks, outcomes, run_ranks

__all__ = ["Died", "Hung", "Outcome", "Raised", "RankPool", "Returned", "on_ranks", "outcomes", "run_ranks"]
