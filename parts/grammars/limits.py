"""What the frontend and its helper process agree on."""

MAX_PATTERN_CHARACTERS = 4096
"""Of a regular expression in a schema."""
