"""Where responses and conversations are stored: tables of --data-dir's database, or of a file of their own."""
