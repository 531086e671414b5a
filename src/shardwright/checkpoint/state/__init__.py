"""States: taken apart into names, tensors and values; united over the ranks; filled again."""
