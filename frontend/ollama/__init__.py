"""Ollama's API, for its clients."""
