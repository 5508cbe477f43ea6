"""Structured output: which tokens a row may draw next (docs/structured-output.md)."""
