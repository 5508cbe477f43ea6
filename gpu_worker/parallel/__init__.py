"""What the ranks that hold a model together exchange."""
