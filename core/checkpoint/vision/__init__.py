"""Descriptions of vision towers."""
