"""Where a checkpoint has the weights that a description needs."""
