"""Mixtures of experts on CPUs."""
