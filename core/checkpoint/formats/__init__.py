"""How quantized checkpoints store their matrices: one way of storing them, one file. Nothing here needs torch."""
