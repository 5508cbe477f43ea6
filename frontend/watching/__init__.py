"""Shows people what engines do: steps as they happen, pages, prefixes, requests (docs/watching.md)."""
