"""From config.json to a description: what families share, what models are whose text is served, and what is nearest."""
