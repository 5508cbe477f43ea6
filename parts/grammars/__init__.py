"""Structured output: what a request generates follows a grammar."""
