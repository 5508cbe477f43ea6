"""Mixtures of experts: which experts a token gets, and their products."""
