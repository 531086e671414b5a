"""Writing: from tensor memory, or from a copy of it, into data files."""
