"""Checkpoints that others wrote, read as tables of tensors over byte ranges. Nothing of them is executed."""
