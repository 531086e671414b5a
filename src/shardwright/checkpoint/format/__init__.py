"""The on-disk format: values, the tensor table, the order of chunks in files, headers and the manifest."""
