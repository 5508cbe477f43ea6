"""Communication between processes: messages, codec, channels, addresses; and what every process does at its start."""
