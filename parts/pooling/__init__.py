"""Vectors in place of tokens."""
