"""Element by element, and what writes or lists whole tensors."""
