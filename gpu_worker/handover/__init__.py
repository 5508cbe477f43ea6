"""KV pages that workers of other engines read, and those that this one reads there."""
