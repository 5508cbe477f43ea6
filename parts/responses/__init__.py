"""The Responses API, and conversations."""
