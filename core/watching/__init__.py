"""What a scheduler does, for people who look at it (docs/watching.md): made only while somebody does."""
