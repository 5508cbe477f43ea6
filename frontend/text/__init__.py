"""Chat templates, tokens, text."""
