"""Commands of `penstock` that need to know how models chat."""
