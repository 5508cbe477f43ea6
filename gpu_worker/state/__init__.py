"""What stays on the device between steps: KV pages, rows, their tokens and sampling parameters."""
