"""The scheduler process, and what starts and configures all processes. No torch in here."""
