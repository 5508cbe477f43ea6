"""From a body as it came to a request that is valid."""
