"""The choice of an engine by what its prefix cache holds (docs/routing.md)."""
