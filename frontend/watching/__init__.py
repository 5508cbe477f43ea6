"""What engines do, for people who look at it: steps as they happen, pages, prefixes, requests (docs/watching.md)."""
