"""Scores of pairs of texts, and classes of texts."""
