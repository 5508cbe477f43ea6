"""Batches that begin together and run one after the other, instead of continuous batching."""
