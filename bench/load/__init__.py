"""Load on a server, and what its clients see: `penstock bench serve`."""
