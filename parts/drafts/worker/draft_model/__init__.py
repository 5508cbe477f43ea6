"""A smaller model with the same vocabulary, which computes the sequences as well."""
