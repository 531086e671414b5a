"""Reductions and scans: sums, norms, statistics, counts."""
