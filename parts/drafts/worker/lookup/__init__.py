"""Guesses without weights: what followed the same tokens before."""
