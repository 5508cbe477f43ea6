"""The scheduler process, and what starts all processes. No torch in here."""
