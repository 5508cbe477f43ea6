"""The page at `/`: static files, and nothing that only a browser could ask for."""
