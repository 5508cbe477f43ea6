"""Work that no client waits for, in the room that others leave (docs/batches.md)."""
