"""The checkpoints of a training run: steps, kept by rules, the newest good one restored."""
