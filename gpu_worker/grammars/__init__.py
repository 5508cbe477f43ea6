"""Structured output: which tokens each row may sample next."""
