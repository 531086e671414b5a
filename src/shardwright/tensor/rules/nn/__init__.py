"""The layers of networks: activations, normalisation, attention, embeddings, recurrent nets, losses."""
