"""Matrices with a few bits for each weight: their form, and products with them."""
