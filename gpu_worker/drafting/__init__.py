"""Drafters, which guess tokens; one file each."""
