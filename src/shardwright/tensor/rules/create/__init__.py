"""Creation of tensors like other tensors, and random operators."""
