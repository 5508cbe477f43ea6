"""Images in requests: from an address or base64 to pixel values in shared memory, and their tokens."""
