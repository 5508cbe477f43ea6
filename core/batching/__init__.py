"""Part of Penstock; see docs/architecture.md."""
