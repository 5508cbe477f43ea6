"""From the tensors of quantized checkpoints to matrices that kernels multiply; one file for each format."""
