"""Recordings: what the scheduler was asked, planned and got back, as lines of a file (docs/replay.md)."""
