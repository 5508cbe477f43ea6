"""What came after the same tokens before: guesses without weights."""
