"""KV pages in files, which survive a restart."""
