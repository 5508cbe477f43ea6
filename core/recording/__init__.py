"""Recordings: the scheduler's requests, plans and results as lines of a file (docs/replay.md)."""
