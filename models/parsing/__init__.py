"""From config.json to a description: shared by families, text parts of larger models, and nearest architectures."""
