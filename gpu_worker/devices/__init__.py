"""Hardware: where tensors live, how arrays get there and results come back."""
