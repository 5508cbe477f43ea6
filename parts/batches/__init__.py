"""Files of requests that are answered behind all others."""
