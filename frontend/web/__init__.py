"""The page at `/`: static files only; all data comes over the API that all clients use."""
