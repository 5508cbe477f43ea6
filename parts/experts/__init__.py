"""What the experts of a model are used for."""
