"""A tier for KV pages on a disk."""
