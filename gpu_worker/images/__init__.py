"""The embeddings of pictures."""
