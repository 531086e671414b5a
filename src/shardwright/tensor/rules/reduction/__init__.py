"""Dimensions reduced or run through: sums, norms, statistics, counts, scans."""
