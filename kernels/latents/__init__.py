"""Attention over latents (multi-head latent attention)."""
