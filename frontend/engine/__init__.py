"""The link to the engine, and what comes back over it."""
