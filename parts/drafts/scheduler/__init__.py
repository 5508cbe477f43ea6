"""How many tokens a worker may draft for each decode, and what its drafts have brought."""

from penstock.parts.drafts.scheduler.drafting import Drafting

PARTS = (Drafting,)
