"""What a step is: its plan, its size, its expected time, its result."""
