"""From config.json to the descriptions of vision towers."""
