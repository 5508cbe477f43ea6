"""Drafts tokens, and says which of the model's draws count."""

from penstock.parts.drafts.worker.part import DraftsPart

PARTS = (DraftsPart,)
