"""Checkpoints as files: the interface of all forms, Hugging Face folders, a digest of weights."""
