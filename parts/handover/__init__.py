"""Prompts that one engine computes and another one goes on with."""
