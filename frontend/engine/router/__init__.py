"""Which engine a request goes to, where a frontend has several. It never waits, and what it knows may be old."""
