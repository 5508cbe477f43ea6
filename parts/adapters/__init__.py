"""Adapters (LoRA) of the model's weights."""
