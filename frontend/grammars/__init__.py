"""Structured output: schemas and grammars, parsed in a helper process."""
