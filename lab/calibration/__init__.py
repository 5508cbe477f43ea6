"""Measures how long steps take on this machine, with the engine itself, for `penstock plan`."""
