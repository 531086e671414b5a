"""Operators on the order of values: extremes, sorting, quantiles, selections."""
