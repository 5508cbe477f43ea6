"""What checkpoints of each family look like: one file each, without torch."""
