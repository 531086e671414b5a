"""Neural network layers: activations, normalisation, attention, embeddings, recurrent nets, losses."""
