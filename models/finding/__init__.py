"""From the name of a model to its checkpoint: paths, the hub, and the form of its files."""
