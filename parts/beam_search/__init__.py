"""Beam search: the most likely sequences, found step by step, in place of drawn ones."""
