"""Looking into a checkpoint without loading it: slices, metadata, verification."""
