"""Views, joins, splits and permutations of elements."""
