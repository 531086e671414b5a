"""Test tools: a pool of local rank processes, proofs of sharding rules, crash simulation and the storage contract."""

from shardwright.testing.crashes import RecordedCalls, crash_states, put_tree
from shardwright.testing.proof import Proof, Verdict, prove
from shardwright.testing.ranks.outcome import Died, Hung, Outcome, Raised, Returned
from shardwright.testing.ranks.pool import RankPool, on_ranks, outcomes, run_ranks
from shardwright.testing.storage_contract import StorageContract

__all__ = [
    "Died",
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
]
