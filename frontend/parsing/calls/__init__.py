"""The machinery behind the tool formats: reading calls in growing text, and the grammars of calls."""
