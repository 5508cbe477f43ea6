"""How models write tool calls: one file for each way, found in `registry.py`."""
