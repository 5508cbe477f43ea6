"""A checkpoint folder: what its files say, and whether they can be served."""
