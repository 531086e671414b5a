"""The public surface: DTensor, its factories, conversion to and from plain tensors, and torch's hooks."""
