"""A tier of the prefix cache in files (docs/kv-tiers.md)."""
