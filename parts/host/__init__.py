"""A tier of the prefix cache, and of preempted sequences, in the host's memory (docs/kv-tiers.md)."""
