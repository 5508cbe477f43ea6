"""Checkpoints in GGUF, the file format of llama.cpp."""
