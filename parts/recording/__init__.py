"""Recordings (docs/replay.md), and traces of steps: what a scheduler did, as lines of files."""
