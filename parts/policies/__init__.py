"""Orders of requests other than first come, first served."""
