"""Pictures in prompts."""
