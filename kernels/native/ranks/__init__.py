"""Ranks of one host that exchange numbers in memory that they share."""
