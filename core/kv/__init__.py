"""Pages of the KV cache and the prefixes that they hold."""
