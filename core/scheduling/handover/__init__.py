"""What each step computes: pure decisions, without IO, clock or tensors."""
