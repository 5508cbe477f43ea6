"""Attention over pages of keys and values: what writes them, reads them, moves and quantizes them."""
