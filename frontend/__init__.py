"""The HTTP side: OpenAI-compatible API, text processing, server-sent events. Token ids only go behind it."""
