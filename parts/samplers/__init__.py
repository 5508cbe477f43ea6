"""Samplers beyond those of the kernels, and orders of all of them."""
