"""Attention over the pages on CPUs: of floats, of quantized keys and values, of latents."""
