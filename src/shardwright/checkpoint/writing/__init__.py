"""Writing: data files, staging buffers, comparison of replicas, leftover files."""
