"""Attention over the pages on CPUs: with float keys and values, with quantized ones, and with latents."""
