"""Embeddings: texts to vectors, by the model that also generates."""
