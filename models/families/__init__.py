"""How checkpoints of each model family are read: one file per family, without torch."""
