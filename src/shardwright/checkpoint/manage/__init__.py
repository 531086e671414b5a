"""The parts of the checkpoint manager: step folders, records, retention, fallback, preemption."""
