"""Test tools: rank processes, training compared with one rank, proofs of rules, crash simulation, storage contract."""

from shardwright.testing.crashes import RecordedCalls, crash_states, put_tree
from shardwright.testing.proof import Proof, Verdict, prove
from shardwright.testing.ranks.outcome import Died, Hung, Outcome, Raised, Returned
from shardwright.testing.ranks.pool import RankPool, on_ranks, outcomes, run_ranks
from shardwright.testing.storage_contract import StorageContract
from shardwright.testing.training import Comparison, Difference, same_as_one_rank

__all__ = [
    "Comparison",
    "Died",
    "Difference",
    "Hung",
    "Outcome",
    "Proof",
    "Raised",
    "RankPool",
    "RecordedCalls",
    "Returned",
    "StorageContract",
    "Verdict",
    "crash_states",
    "on_ranks",
    "outcomes",
    "prove",
    "put_tree",
    "run_ranks",
    "same_as_one_rank",
]
