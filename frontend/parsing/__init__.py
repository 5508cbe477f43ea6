"""Reasoning and tool calls in the text that a model writes."""
