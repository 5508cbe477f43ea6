"""Penstock, an LLM inference engine."""
