"""The groups of options, one a file."""
