"""How the work runs: threads, progress, memory windows."""
