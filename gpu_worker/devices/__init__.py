"""Hardware: where tensors live, how arrays get there, and how results come back."""
