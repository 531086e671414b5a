"""The `shardwright` command: look at checkpoints, verify, compare, change and remove them, from a shell."""
