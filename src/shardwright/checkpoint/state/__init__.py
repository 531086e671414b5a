"""States: flattened into names, tensors and values, and merged over the ranks."""
