"""Descriptions of models: what a family makes of config.json, and all that executors know."""
