"""Drafters for the demo model, trained on its own answers."""
