"""From the tensors of quantized checkpoints to matrices that kernels multiply: one format, one file."""
