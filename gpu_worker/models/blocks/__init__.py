"""The parts that decoders are made of: weights, and the computation over `kernels/`."""
