"""Products and decompositions: contractions, linear algebra, Fourier transforms, distances."""
