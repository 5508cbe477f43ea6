"""Structured output: schemas and grammars, read in a helper process."""
