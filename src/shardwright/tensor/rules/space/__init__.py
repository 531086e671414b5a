"""What looks at a neighbourhood: convolution, pooling, resizing, patches."""
