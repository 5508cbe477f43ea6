"""One step: from a plan to its inputs, the forward pass, sampled tokens and the result."""
