"""The machinery behind the tool formats: text that grows, calls found in it, grammars of calls."""
