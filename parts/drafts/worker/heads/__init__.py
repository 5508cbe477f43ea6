"""Heads whose inputs are what the model has computed."""
