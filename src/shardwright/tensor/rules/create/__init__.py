"""New tensors: beside old ones, and of random numbers."""
