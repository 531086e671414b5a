"""Ranks to test on: a pool of local processes that share a gloo process group. And proofs of rules, without any."""

from shardwright.testing.outcome import Died, Hung, Outcome, Raised, Returned
from shardwright.testing.pool import RankPool, on_ranks, outcomes, run_ranks
from shardwright.testing.proof import Proof, Verdict, prove

__all__ = [
    "Died",
    "Hung",
    "Outcome",
    "Proof",
    "Raised",
    "RankPool",
    "Returned",
    "Verdict",
    "on_ranks",
    "outcomes",
    "prove",
    "run_ranks",
]
