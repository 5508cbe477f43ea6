"""Communication between processes: messages, codec, channels, addresses, and what all processes do at their start."""
