"""What a scheduler did, in a file that `penstock replay` and `penstock simulate` read."""
