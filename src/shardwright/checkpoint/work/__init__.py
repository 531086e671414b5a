"""How the work is done: in threads, counted, with errors that are the same on all ranks."""
