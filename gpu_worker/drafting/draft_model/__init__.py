"""A smaller model of the same vocabulary, which computes the sequences, too."""
