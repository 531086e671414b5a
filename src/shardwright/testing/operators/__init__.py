"""PyTorch's operator database as a test suite: every operator, its samples, and placements of their inputs."""

from shardwright.testing.operators.cases import Case, cases_of
from shardwright.testing.operators.database import Entry, entries, entry, samples_of
from shardwright.testing.operators.running import Ours, Outcome, System, run_case

__all__ = ["Case", "Entry", "Ours", "Outcome", "System", "cases_of", "entries", "entry", "run_case", "samples_of"]
