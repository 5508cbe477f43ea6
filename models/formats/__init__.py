"""How quantized checkpoints store their matrices: one file per format. Nothing here needs torch."""
