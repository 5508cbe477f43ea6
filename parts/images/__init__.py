"""Pictures in prompts (docs/images.md)."""
