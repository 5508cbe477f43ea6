"""The checkpoints of drafters: draft models, and heads that get a model's hidden states."""
