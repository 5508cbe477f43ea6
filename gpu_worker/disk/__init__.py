"""Pages of KV in files, which survive the process."""
