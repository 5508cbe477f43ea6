"""Structured output: which tokens each row may sample next."""

from penstock.parts.grammars.worker.masks import Grammars

PARTS = (Grammars,)
