"""The public API: DTensor, its factories, conversion to and from plain tensors, and hooks into torch."""
