"""A live view of the scheduler (docs/watching.md), produced only while it is watched."""
