"""The HTTP side: OpenAI-compatible API, text processing, server-sent events. The engine only gets token ids."""
