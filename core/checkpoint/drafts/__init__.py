"""What drafters' own checkpoints say: draft models, and heads that are fed a model's hidden states."""
