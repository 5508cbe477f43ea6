"""What a model needs of a machine, and how fast it can be there at best; from its description, without running it."""
