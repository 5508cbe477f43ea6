"""Matrices of a few bits a weight: what they are, and their products."""
