"""Structured output: which tokens each row may draw next."""
