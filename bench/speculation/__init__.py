"""What guessing tokens is worth."""
