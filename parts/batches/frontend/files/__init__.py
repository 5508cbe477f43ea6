"""Files that clients upload, and those that batches write: `/v1/files`."""
