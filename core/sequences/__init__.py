"""Sequences and the queue in which they wait."""
