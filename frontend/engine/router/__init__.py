"""Chooses the engine for a request if there are several. It never waits, and what it knows may be out of date."""
