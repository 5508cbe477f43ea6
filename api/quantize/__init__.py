"""`penstock quantize`: a checkpoint of floats becomes one that is quantized."""
