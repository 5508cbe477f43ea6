"""What this machine does in the time of a step, measured with the engine itself, for `penstock plan`."""
