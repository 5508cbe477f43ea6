"""Grammars in a frontend: what clients write is read, and joined with what the model writes around it."""

from penstock.parts.grammars.frontend.reader import GrammarReader

PARTS = (GrammarReader,)
