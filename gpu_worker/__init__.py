"""The worker: weights, KV pool and row state on one device; it executes step plans and decides nothing."""
