"""How many tokens each expert computes where experts are spread over ranks (docs/parallelism.md)."""
