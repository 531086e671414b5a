"""Operators with a neighbourhood: convolution, pooling, resizing, patches."""
