"""Processes that speak to the supervisor as real ones do, and do nothing else: `python -m tests.core.fake_child`."""
