"""The formats in which models write tool calls: one file for each, listed in `registry.py`."""
