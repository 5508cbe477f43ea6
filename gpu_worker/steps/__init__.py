"""One step: from a plan to its inputs, the forward pass, drawn tokens and the result."""
