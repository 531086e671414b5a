"""What is stored: the manifest, its columns of tensors, the headers of data files. docs/format.md specifies it."""
