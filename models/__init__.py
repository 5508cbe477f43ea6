"""Checkpoints: what their files say, and whether they can be served."""
