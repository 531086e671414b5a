"""Matrix operators: contractions, linear algebra, Fourier transforms, distances."""
