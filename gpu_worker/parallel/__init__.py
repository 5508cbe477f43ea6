"""Exchange between the ranks that hold a model together."""
