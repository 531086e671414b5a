"""What follows from the order of values: extremes, sorting, quantiles, selections."""
