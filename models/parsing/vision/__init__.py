"""Parses the descriptions of vision towers from config.json."""
