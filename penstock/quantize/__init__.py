"""`penstock quantize`: makes a quantized checkpoint from one with floats."""
