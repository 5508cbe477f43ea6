"""Products with quantized weights."""
