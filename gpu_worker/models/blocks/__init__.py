"""The parts that decoders are made of: weights, and their computation by `kernels/`."""
