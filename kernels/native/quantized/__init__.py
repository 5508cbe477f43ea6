"""Quantized weights for the CPU's own kernels."""
