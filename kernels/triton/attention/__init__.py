"""Attention over pages, and the layout of pages."""
