"""Heads that are fed what the model has computed."""
