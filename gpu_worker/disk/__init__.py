"""KV pages in files, which survive the process."""
