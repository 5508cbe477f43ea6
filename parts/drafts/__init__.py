"""Speculative decoding: tokens drafted ahead of the model, which verifies several in one step (docs/speculation.md)."""
