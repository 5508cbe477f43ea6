"""A step's parts: its plan, its size, its expected time, its result."""
